"""Account for time: the busy and idle seconds of one thread."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator


class ActivityClock:
    """Assigns every second of one thread to exactly one activity.

    The seconds of all activities add up to the time since the clock was made. So an idle ratio between any two
    readings is exact.

    >>> ticks = iter([0.0, 2.0, 5.0, 6.0])
    >>> clock = ActivityClock("wait", now=lambda: next(ticks))
    >>> with clock.during("train"):
    ...     pass
    >>> clock.seconds()
    {'wait': 3.0, 'train': 3.0}
    """

    def __init__(self, idle: str, *, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._activity = idle
        self._since_s = now()
        self._seconds: dict[str, float] = defaultdict(float)

    @contextlib.contextmanager
    def during(self, activity: str) -> Iterator[None]:
        """Assign the time inside the block to ``activity``; afterwards the previous activity continues."""
        before = self._switch(activity)
        try:
            yield
        finally:
            self._switch(before)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each activity so far, including the current one."""
        self._switch(self._activity)
        return dict(self._seconds)

    def _switch(self, activity: str) -> str:
        now_s = self._now()
        self._seconds[self._activity] += now_s - self._since_s
        before, self._activity, self._since_s = self._activity, activity, now_s
        return before
