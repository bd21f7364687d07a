"""Move the lead of the replicas, and how many of them sleep, by the measured waits of both sides. Needs no process."""

from __future__ import annotations

from typing import NamedTuple

from hwrl.run.config import Config
from hwrl.run.report import Metrics
from hwrl.run.report.bottleneck import BATCH_WAIT

_WINDOW_STEPS = 8
"""Steps between two decisions: a change needs some steps until the waits show it."""
_LONG_WAIT, _SHORT_WAIT = 0.05, 0.02
"""The trainer waits too long above the first share of the time, and hardly below the second."""
_BUSY = 0.8
"""Replicas that are busy for more than this share of the time have no room left."""


class ThrottleState(NamedTuple):
    """At most ``lead_groups`` groups beyond those of the present version are active; ``asleep`` replicas get none."""

    lead_groups: int
    asleep: int


class Throttle:
    """Keeps the lead of the replicas, and so the age of the tokens, as small as it may be while the trainer works.

    The *lead* are the groups that may be active beyond those of the present version: 0 is synchronous training, and
    ``staleness`` × ``batch_groups`` the bound. With ``sleeps`` idle replicas may get no prompts, so that they sleep.
    The rule, after every 8 steps, with the shares of the time in these steps:

    * The trainer waited for more than 5 %: the lead grows by half a batch. If the awake replicas were busy for more
      than 80 %, or the lead is at its bound, a sleeping replica wakes, too.
    * The trainer waited for less than 2 %, and the awake replicas were busy for less than 80 %: a replica falls
      asleep if the others would then be busy for less than 80 %; else the lead shrinks by an eighth of a batch.
    * Otherwise nothing moves.

    This is a step controller with a dead band, between 2 % and 5 %. It grows four times as fast as it shrinks, because
    a wait costs time at once, and an old token only a little learning. The widths are our choice, not measured optima.
    """

    def __init__(self, *, staleness: int, batch_groups: int, sleeps: bool) -> None:
        self._most, self._batch, self._sleeps = staleness * batch_groups, batch_groups, sleeps
        self._window: list[Metrics] = []
        self.state = ThrottleState(self._most, 0)

    @classmethod
    def of(cls, config: Config, *, sleeps: bool) -> Throttle | None:
        """Return the throttle of a run; None if it is not adaptive."""
        if not config.async_training.adaptive:
            return None
        staleness = config.async_training.staleness_threshold
        return cls(staleness=staleness, batch_groups=config.groups_per_version, sleeps=sleeps)

    def metrics(self) -> Metrics:
        """Return the present state for a line of metrics."""
        return {"throttle/lead_versions": self.state.lead_groups / self._batch, "throttle/asleep": self.state.asleep}

    def observe(self, line: Metrics, *, replicas: int) -> bool:
        """Note the metrics ``line`` of a step, with so many running ``replicas``; return whether it has decided.

        Lines without ``perf/step_s`` do not count.
        """
        if "perf/step_s" in line:
            self._window.append(line)
        if len(self._window) < _WINDOW_STEPS:
            return False
        wall_s = max(self._sum("perf/step_s"), 1e-9)
        asleep = min(self.state.asleep, max(0, replicas - 1))  # replicas may have left
        self.state = self.state._replace(asleep=asleep)
        awake = max(1, replicas - asleep)
        busy_s = self._sum("rollout/generate_s") + self._sum("rollout/update_s")
        self.state = self._decide(self._sum(BATCH_WAIT) / wall_s, busy_s / wall_s, awake)
        self._window.clear()
        return True

    def _sum(self, name: str) -> float:
        return sum(line.get(name, 0.0) for line in self._window)

    def _decide(self, wait: float, busy: float, awake: int) -> ThrottleState:
        """Return the next state. ``busy`` is the sum over the ``awake`` replicas: 1.5 means one and a half."""
        lead, asleep = self.state
        has_room = busy < _BUSY * awake
        if wait > _LONG_WAIT:
            wakes = asleep > 0 and (not has_room or lead == self._most)
            return ThrottleState(min(self._most, lead + max(1, self._batch // 2)), asleep - wakes)
        if wait < _SHORT_WAIT and has_room:
            if self._sleeps and awake > 1 and busy < _BUSY * (awake - 1):
                return ThrottleState(lead, asleep + 1)
            return ThrottleState(max(0, lead - max(1, self._batch // 8)), asleep)
        return self.state
