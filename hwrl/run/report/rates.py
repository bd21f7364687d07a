"""Metrics about the time between two steps: tokens per second and idle ratios."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from hwrl.run.report.bottleneck import BUSY_SECONDS, busy_shares
from hwrl.run.report.records import Metrics

if TYPE_CHECKING:
    from hwrl.run.cluster.placement import DeviceCounts
    from hwrl.run.processes.actors import BatchInfo

WINDOW_STEPS = 20
"""Steps over which ``perf/bottleneck`` is computed. One step is too short, as it may cut through a replica's work."""
COUNTS = ("received_nbytes", "base_loads", "sleeps", "freed_nbytes")


class StepRates:
    """Turns the replicas' running totals into metrics of the time since the last step.

    ``history`` has the lines of the run before a resume. ``devices`` is the number of devices of each side; update it
    when replicas have joined or left.
    """

    def __init__(
        self, history: list[Metrics], *, devices: DeviceCounts, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self.devices, self._now = devices, now
        self._last_totals: dict[str, dict[str, float]] = {}
        self._window: deque[Metrics] = deque(maxlen=WINDOW_STEPS)
        self._rollout_idle_ratio = 0.0
        self.go_back(history)

    def start_clock(self) -> None:
        """Start the first interval now. Call this when every process is ready."""
        self._last_s = self._now()

    def go_back(self, history: list[Metrics]) -> None:
        """Set the number of trained tokens back to the end of ``history``, after the trainer has restarted.

        The replicas keep their totals when the trainer returns to a checkpoint. So the next rates cover the time since
        the last call of :meth:`metrics` (before the first call: since now), recovery included. That line therefore has
        no ``perf/step_s`` and no metrics derived from it. Undone steps no longer count for ``perf/bottleneck``.
        """
        self._window.clear()
        self._recovered = bool(self._last_totals)
        self._trained_tokens = history[-1].get("response/tokens_total", 0.0) if history else 0.0
        if not self._last_totals:
            self.start_clock()

    def metrics(self, trained: Metrics, batch: BatchInfo) -> Metrics:
        """Return the rates since the last call. ``trained`` has the trainer's metrics of the step on ``batch``."""
        now_s = self._now()
        elapsed_s, self._last_s = max(now_s - self._last_s, 1e-9), now_s
        rollout = self._added_since_last(batch.replicas)
        if rollout.get("idle_s", 0.0) + _busy_s(rollout) > 0:  # otherwise no replica has reported since the last step
            self._rollout_idle_ratio = rollout["idle_s"] / (rollout["idle_s"] + _busy_s(rollout))
        self._trained_tokens += trained["response/tokens"]
        trainer_s = sum(value for name, value in trained.items() if name.startswith("timing_s/"))
        metrics = {
            **{f"ledger/{name}": float(value) for name, value in batch.counts.items()},
            **_untrained(batch),
            "response/tokens_total": self._trained_tokens,
            "trainer/tokens_per_s": trained["response/tokens"] / elapsed_s,
            "trainer/idle_ratio": trained["timing_s/wait"] / max(trainer_s, 1e-9),
            "rollout/tokens_per_s": rollout.get("tokens", 0.0) / elapsed_s,
            "rollout/idle_ratio": self._rollout_idle_ratio,
            "rollout/reward_errors": rollout.get("reward_errors", 0.0),
            "rollout/replicas": float(len(batch.replicas)),
            **{f"rollout/{name}": rollout[name] for name in ("idle_s", *BUSY_SECONDS, *COUNTS) if name in rollout},
        }
        if not self._recovered:
            metrics["perf/step_s"] = elapsed_s
            metrics["perf/tokens_per_s_per_device"] = trained["response/tokens"] / elapsed_s / self.devices.distinct
        self._recovered = False
        if busy_s := _busy_s(rollout):
            per_replica = rollout.get("tokens", 0.0) / busy_s
            metrics["perf/rollout_tokens_per_s_per_device"] = per_replica * len(batch.replicas) / self.devices.rollout
        self._window.append({**trained, **metrics})
        shares = busy_shares(self._window)
        return metrics if shares is None else {**metrics, "perf/bottleneck": shares.code}

    def _added_since_last(self, replicas: dict[str, dict[str, float]]) -> dict[str, float]:
        """Return the growth of each total since the last step, summed over the replicas."""
        sums: dict[str, float] = {}
        for replica, totals in replicas.items():
            before = self._last_totals.get(replica, {})
            for name, value in totals.items():
                sums[name] = sums.get(name, 0.0) + value - before.get(name, 0.0)
        self._last_totals = replicas
        return sums


def _busy_s(totals: dict[str, float]) -> float:
    return sum(totals.get(name, 0.0) for name in BUSY_SECONDS)


def _untrained(batch: BatchInfo) -> Metrics:
    """Return the numbers of prompts that were filtered or failed since the last batch."""
    filtered = len(batch.untrained.filtered)
    return {
        "groups/filtered": float(filtered),
        "groups/filtered_ratio": filtered / max(1, filtered + len(batch.sequence_numbers)),
        "groups/failed": float(len(batch.untrained.failed)),
    }
