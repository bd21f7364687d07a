"""The events of a simulation, in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class EventQueue:
    """Runs functions at simulated times; :attr:`now_s` is the time of the present one. Equal times keep their order."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` at ``time_s``, or now if that is over."""
        heapq.heappush(self._events, (max(time_s, self.now_s), next(self._numbers), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Call ``act`` after ``delay_s`` seconds."""
        self.at(self.now_s + delay_s, act)

    def run_next(self) -> bool:
        """Go to the next event, and run it. Return False if there is none."""
        if not self._events:
            return False
        self.now_s, _, act = heapq.heappop(self._events)
        act()
        return True
