"""When an engine sleeps: as soon as there has been nothing for it to do for a while."""

from __future__ import annotations

import time

from hwrl.interfaces import MEMORY_TAGS, RolloutEngine

AFTER_S = 0.2
"""How long an engine has nothing to do before it sleeps: falling asleep and waking take about as long."""


class Sleeper:
    """Lets ``engine`` sleep at ``level`` when it has been idle for AFTER_S; with None, never. The engine's thread."""

    def __init__(self, engine: RolloutEngine, *, level: int | None) -> None:
        self._engine, self._level = engine, level
        self._idle_since_s: float | None = None
        self._sleeps = self._freed_nbytes = 0
        self.asleep = False

    def is_due(self, *, idle: bool) -> bool:
        """Note whether the engine has nothing to do now; return whether it has been so for long enough."""
        if self._level is None or self.asleep or not idle:
            self._idle_since_s = None
            return False
        self._idle_since_s = self._idle_since_s or time.monotonic()
        return time.monotonic() - self._idle_since_s >= AFTER_S

    def sleep(self) -> None:
        """Let the engine sleep. Blocks."""
        assert self._level is not None, "is_due said so"
        self._freed_nbytes += self._engine.sleep(level=self._level)
        self._sleeps += 1
        self._idle_since_s = None
        self.asleep = True

    def wake(self, *, cache: bool = True) -> None:
        """Wake the engine if it sleeps; without ``cache`` its weights only, and the rest sleeps on. Blocks."""
        if self.asleep:
            self._engine.wake(MEMORY_TAGS if cache else {"weights"})
            self.asleep = not cache

    def totals(self) -> dict[str, float]:
        """Return running totals; none for an engine that never sleeps."""
        if self._level is None:
            return {}
        return {"sleeps": float(self._sleeps), "freed_nbytes": float(self._freed_nbytes)}
