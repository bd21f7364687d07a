"""Which side of a run limits its speed: the trainer or the rollout replicas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hwrl.run.report.records import Metrics

TRAINER_BUSY = ("timing_s/train", "timing_s/critic", "timing_s/sync", "timing_s/save")
BUSY_SECONDS = ("generate_s", "update_s", "sleep_s")
"""The working times in a replica's totals."""
BATCH_WAIT = "perf/batch_wait_s"
"""The metric with the seconds from the request for a batch until its arrival."""
_EQUAL = 0.05
"""A smaller difference counts as none, because the window may end inside a replica's work."""

Side = Literal["trainer", "rollout"]


@dataclass(frozen=True)
class BusyShares:
    """The busy time of the trainer and of an average replica, as shares of the wall time from 0 to 1."""

    trainer: float
    rollout: float

    @property
    def bottleneck(self) -> Side | None:
        """The busier side; None if both work for about the same time."""
        if abs(self.trainer - self.rollout) < _EQUAL:
            return None
        return "trainer" if self.trainer > self.rollout else "rollout"

    @property
    def code(self) -> float:
        """:attr:`bottleneck` as a number for metrics: 0.0 for the trainer, 1.0 for the rollout, 0.5 for neither."""
        return {"trainer": 0.0, "rollout": 1.0, None: 0.5}[self.bottleneck]

    @property
    def wall_ratio(self) -> float:
        """The wall time divided by the busy time of the busier side: 1.0 if that side never waits."""
        return 1 / max(self.trainer, self.rollout, 1e-9)

    def __str__(self) -> str:
        shares = {"trainer": self.trainer, "rollout": self.rollout}
        if self.bottleneck is None:
            return f"none, trainer and rollout are equally busy ({self.trainer:.0%} and {self.rollout:.0%} of the time)"
        busy = shares.pop(self.bottleneck)
        ((other, other_busy),) = shares.items()
        return f"{self.bottleneck}, busy {busy:.0%} of the time; {other} {other_busy:.0%}"


def describe_waits(lines: Sequence[Metrics]) -> str | None:
    """Return a text about how long each side waited in the steps of ``lines``; None if no line has ``perf/step_s``."""
    waits = _shares(lines, [BATCH_WAIT], ["rollout/idle_s"])
    if waits is None:
        return None
    return (
        f"the trainer waits for samples {waits[0]:.0%} of the time; replicas wait for room {waits[1]:.0%} of the time"
    )


def busy_shares(lines: Sequence[Metrics]) -> BusyShares | None:
    """Return the busy shares over the steps of ``lines``; None if no line has ``perf/step_s``."""
    shares = _shares(lines, TRAINER_BUSY, [f"rollout/{name}" for name in BUSY_SECONDS])
    return None if shares is None else BusyShares(*shares)


def _shares(lines: Sequence[Metrics], trainer: Sequence[str], rollout: Sequence[str]) -> tuple[float, float] | None:
    """Return the share of each side's time that its metrics (in seconds) add up to.

    Returns None if no line has ``perf/step_s``.
    """
    timed = [line for line in lines if line.get("perf/step_s", 0.0) > 0]
    wall_s = sum(line["perf/step_s"] for line in timed)
    if not wall_s:
        return None
    replicas_s = sum(line["perf/step_s"] * max(1.0, line.get("rollout/replicas", 1.0)) for line in timed)
    spent_s = [sum(line.get(name, 0.0) for line in timed for name in names) for names in (trainer, rollout)]
    return min(1.0, spent_s[0] / wall_s), min(1.0, spent_s[1] / replicas_s)
