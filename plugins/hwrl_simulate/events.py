"""The event queue of a simulation."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """Calls functions at simulated times. :attr:`now_s` is the current time. Events of equal times keep their order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Schedule a call of ``act`` at ``time_s``, or now if that time has passed."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule a call of ``act`` in ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, act)

    def run_next(self) -> bool:
        """Advance to the next event and run it. Returns False if there is none."""
        if not self._events:
            return False
        self.now_s, _, act = heapq.heappop(self._events)
        act()
        return True
