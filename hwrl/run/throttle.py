"""The controller of ``async_training.adaptive``: it sets how far the replicas may run ahead of training.

It also sets how many replicas sleep. Its inputs are the measured waits of the trainer and of the replicas. It runs in
the driver and needs no other process.
"""

from __future__ import annotations

from typing import NamedTuple

from hwrl.run.config import Config
from hwrl.run.report import Metrics
from hwrl.run.report.bottleneck import BATCH_WAIT

_WINDOW_STEPS = 8
"""Steps between two decisions: a change takes some steps to show in the waits."""
_LONG_WAIT, _SHORT_WAIT = 0.05, 0.02
"""Shares of the wall time. Above the first one the trainer waits too long; below the second one it hardly waits."""
_BUSY = 0.8
"""Replicas that are busy for more than this share of the time have no capacity left."""


class ThrottleState(NamedTuple):
    """The limits in force: the lead, and the number of sleeping replicas, which get no prompts.

    ``lead_groups`` is the maximum number of prompt groups that are active beyond the groups of the current version.
    """

    lead_groups: int
    asleep: int


class Throttle:
    """Keeps the lead as small as possible without making the trainer wait. A small lead means fresh tokens.

    The *lead* is the number of prompt groups that may be active beyond the groups of the current version. 0 means
    synchronous training. It begins at its upper bound, ``max_lead``. With ``sleeps`` the controller may also stop
    giving prompts to some replicas, so that they go to sleep and free their device memory.

    After every 8 steps it applies one rule. All shares are of the wall time of these steps, and "batch" means the
    groups of one version:

    * If the trainer waited for more than 5 %, the lead grows by half a batch. A sleeping replica also wakes up if the
      awake ones were busy for more than 80 %, or if the lead is at its bound.
    * If the trainer waited for less than 2 %, and the awake replicas were busy for less than 80 %, a replica goes to
      sleep, provided that the others would then stay below 80 %. Otherwise the lead shrinks by an eighth of a batch.
    * In all other cases nothing changes.

    This is a step controller with a dead band from 2 % to 5 %. It grows four times as fast as it shrinks, because a
    wait costs time at once and an older token costs only a little learning. We chose the numbers; they are not tuned.
    """

    def __init__(self, *, max_lead: int, groups_per_version: int, sleeps: bool) -> None:
        self._max_lead, self._batch, self._sleeps = max_lead, groups_per_version, sleeps
        self._window: list[Metrics] = []
        self.state = ThrottleState(self._max_lead, 0)

    @classmethod
    def of(cls, config: Config, *, sleeps: bool) -> Throttle | None:
        """Return the controller of a run; None unless ``async_training.adaptive`` is set."""
        if not config.async_training.adaptive:
            return None
        return cls(max_lead=config.lead_groups, groups_per_version=config.groups_per_version, sleeps=sleeps)

    def metrics(self) -> Metrics:
        """Return the current state as metrics."""
        return {"throttle/lead_versions": self.state.lead_groups / self._batch, "throttle/asleep": self.state.asleep}

    def observe(self, line: Metrics, *, replicas: int) -> bool:
        """Add the metrics ``line`` of a step. Return whether :attr:`state` was decided again, even if it is the same.

        ``replicas`` is the number of running replicas. Lines without ``perf/step_s`` are ignored.
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
        """Return the next state. ``busy`` is summed over the ``awake`` replicas: 1.5 means one and a half busy ones."""
        lead, asleep = self.state
        has_room = busy < _BUSY * awake
        if wait > _LONG_WAIT:
            wakes = asleep > 0 and (not has_room or lead == self._max_lead)
            return ThrottleState(min(self._max_lead, lead + max(1, self._batch // 2)), asleep - wakes)
        if wait < _SHORT_WAIT and has_room:
            if self._sleeps and awake > 1 and busy < _BUSY * (awake - 1):
                return ThrottleState(lead, asleep + 1)
            return ThrottleState(max(0, lead - max(1, self._batch // 8)), asleep)
        return self.state
