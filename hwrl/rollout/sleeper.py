"""When an engine sleeps: as soon as there has been nothing for it to do for a while."""

from __future__ import annotations

import time

from hwrl.rollout.engine import MEMORY_TAGS, RolloutEngine

AFTER_S = 0.2
"""How long an engine has nothing to do before it sleeps: falling asleep and waking take as long."""


class Sleeper:
    """Lets ``engine`` sleep at ``level`` while it is idle; with None, never. One thread, the engine's.

    ``sleeps`` and ``freed_nbytes`` are running totals.
    """

    def __init__(self, engine: RolloutEngine, *, level: int | None) -> None:
        self._engine, self._level = engine, level
        self._idle_since_s: float | None = None
        self.asleep = False
        self.sleeps = self.freed_nbytes = 0

    def rest(self, *, idle: bool) -> bool:
        """Note whether the engine has nothing to do; return whether it falls asleep over it. Blocks while it does."""
        now_s = time.monotonic()
        if not idle or self._idle_since_s is None:
            self._idle_since_s = now_s if idle else None
        if self._level is None or self.asleep or not idle or now_s - (self._idle_since_s or now_s) < AFTER_S:
            return False
        self.freed_nbytes += self._engine.sleep(level=self._level)
        self.sleeps += 1
        self.asleep = True
        return True

    def wake(self, *, cache: bool = True) -> None:
        """Wake the engine if it sleeps; without ``cache`` its weights only, and the rest sleeps on. Blocks."""
        if self.asleep:
            self._engine.wake(MEMORY_TAGS if cache else {"weights"})
            self.asleep = not cache
