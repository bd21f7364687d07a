"""Figures that need two readings: rates and idle ratios over the time between two steps."""

from __future__ import annotations

import time

from hwrl.run.actors import Taken

BUSY = ("generate_s", "update_s", "sleep_s")
CAME_AND_WENT = ("received_nbytes", "base_loads", "sleeps", "freed_nbytes")


class FigureWindow:
    """Turns running totals into figures of the window since the last step; ``history`` is what was before a resume."""

    def __init__(self, history: list[dict[str, float]]) -> None:
        self._last: dict[str, dict[str, float]] = {}
        self._last_s = time.perf_counter()
        self._trained_tokens = history[-1].get("response/tokens_total", 0.0) if history else 0.0
        self._rollout_idle_ratio = 0.0

    def figures(self, trained: dict[str, float], taken: Taken) -> dict[str, float]:
        """Return the step's rates: ``trained`` is the trainer's figures, ``taken`` what came with the batch."""
        now_s = time.perf_counter()
        window_s, self._last_s = max(now_s - self._last_s, 1e-9), now_s
        rollout = self._replica_sums(taken)
        if rollout.get("idle_s", 0.0) + _busy_s(rollout) > 0:  # else no replica has reported since the last step
            self._rollout_idle_ratio = rollout["idle_s"] / (rollout["idle_s"] + _busy_s(rollout))
        self._trained_tokens += trained["response/tokens"]
        trainer_s = sum(value for name, value in trained.items() if name.startswith("timing_s/"))
        return {
            **{f"ledger/{name}": float(value) for name, value in taken.counts.items()},
            "response/tokens_total": self._trained_tokens,
            "trainer/tokens_per_s": trained["response/tokens"] / window_s,
            "trainer/idle_ratio": trained["timing_s/wait"] / max(trainer_s, 1e-9),
            "rollout/tokens_per_s": rollout.get("tokens", 0.0) / window_s,
            "rollout/idle_ratio": self._rollout_idle_ratio,
            "rollout/reward_errors": rollout.get("reward_errors", 0.0),
            "rollout/replicas": float(len(taken.replicas)),
            **{f"rollout/{name}": rollout[name] for name in (*BUSY, *CAME_AND_WENT) if name in rollout},
        }

    def _replica_sums(self, taken: Taken) -> dict[str, float]:
        """Return what all replicas together added to their totals since the last step."""
        sums: dict[str, float] = {}
        for replica, totals in taken.replicas.items():
            before = self._last.get(replica, {})
            for name, value in totals.items():
                sums[name] = sums.get(name, 0.0) + value - before.get(name, 0.0)
        self._last = taken.replicas
        return sums


def _busy_s(totals: dict[str, float]) -> float:
    return sum(totals.get(name, 0.0) for name in BUSY)
