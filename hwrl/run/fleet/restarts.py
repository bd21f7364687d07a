"""Decide when a dead replica is replaced, and when it is given up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MOST_DOUBLINGS = 10
"""Enough for the longest pause. 2.0 to the power of a large number of deaths raises OverflowError."""


class RestartPlan:
    """Counts the consecutive deaths of each replica, and has the time of its next start.

    A process that has finished a prompt before its death resets the count, unless it died like the process before it,
    and had taken new weights no more than once: then it dies at each update. The first restart is immediate. The pauses
    before the next ones are 1, 2, 4, ... seconds, at most 60: an exponential backoff, so that a crash loop costs
    little. After ``limit`` consecutive restarts the replica is given up. ``clock`` returns seconds.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._deaths: Counter[str] = Counter()
        self._due_s: dict[str, float] = {}
        self._cause_of: dict[str, str] = {}  # of the last death

    def add_death(self, name: str, *, finished: bool, updates: int = 0, cause: str = "") -> float | None:
        """Count a death of the replica ``name``; ``finished`` says whether this process had finished a prompt.

        ``updates`` is the number of times that it had taken new weights, its first ones included.
        Returns the pause before the restart in seconds; None if the replica is given up.
        """
        again = bool(cause) and cause == self._cause_of.get(name) and updates <= 1
        self._cause_of[name] = cause
        deaths = self._deaths[name] = 1 if finished and not again else self._deaths[name] + 1
        if deaths > self._limit:
            self.forget(name)
            return None
        doublings = min(deaths - 2, _MOST_DOUBLINGS)
        pause_s = min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S) if deaths > 1 else 0.0
        self._due_s[name] = self._clock() + pause_s
        return pause_s

    @property
    def paused(self) -> set[str]:
        """The replicas in the pause between a death and a restart."""
        return set(self._due_s)

    def take_due(self) -> list[str]:
        """Return the replicas whose pause is over, and remove them from :attr:`paused`. The caller starts them."""
        due = [name for name, due_s in self._due_s.items() if due_s <= self._clock()]
        for name in due:
            del self._due_s[name]
        return due

    def forget(self, name: str) -> None:
        """Forget all deaths of ``name``: a new replica with this name starts with a count of 0."""
        self._deaths.pop(name, None)
        self._cause_of.pop(name, None)
        self._due_s.pop(name, None)
