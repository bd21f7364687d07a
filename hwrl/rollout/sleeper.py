"""Put an idle engine to sleep, and wake it."""

from __future__ import annotations

import time

from hwrl.interfaces import MEMORY_TAGS, RolloutEngine

AFTER_S = 0.2
"""Idle time before an engine sleeps. A sleep and a wake together take about as long."""


class Sleeper:
    """Puts ``engine`` to sleep at ``level`` after AFTER_S of idleness; never if ``level`` is None.

    Only the engine's thread may call it.
    """

    def __init__(self, engine: RolloutEngine, *, level: int | None) -> None:
        self._engine, self._level = engine, level
        self._idle_since_s: float | None = None
        self._sleeps = self._freed_nbytes = 0
        self.asleep = False

    def is_due(self, *, idle: bool) -> bool:
        """Note whether the engine is idle now; return whether it should sleep now."""
        if self._level is None or self.asleep or not idle:
            self._idle_since_s = None
            return False
        self._idle_since_s = self._idle_since_s or time.monotonic()
        return time.monotonic() - self._idle_since_s >= AFTER_S

    def sleep(self) -> None:
        """Put the engine to sleep. Blocks."""
        assert self._level is not None, "is_due returned True"
        self._freed_nbytes += self._engine.sleep(level=self._level)
        self._sleeps += 1
        self._idle_since_s = None
        self.asleep = True

    def wake(self, *, cache: bool = True) -> None:
        """Wake the engine if it sleeps. Without ``cache`` wake its weights only. Blocks."""
        if self.asleep:
            self._engine.wake(MEMORY_TAGS if cache else {"weights"})
            self.asleep = not cache

    def totals(self) -> dict[str, float]:
        """Return running totals; empty if the engine never sleeps."""
        if self._level is None:
            return {}
        return {"sleeps": float(self._sleeps), "freed_nbytes": float(self._freed_nbytes)}
