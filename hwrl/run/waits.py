"""What the run waits for, in words: said when a wait is longer than it usually is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_S = 10.0
"""A wait or a silence is told after so many seconds, and again each time it has doubled."""
_USUAL = 2.0  # a wait that was twice as long before is nothing to tell


@dataclass
class _Wait:
    what: str
    began_s: float
    tell_after_s: float


class WaitLog:
    """Tells through ``say`` what the run waits for, by ``clock`` (seconds). Waits nest; the innermost is told."""

    def __init__(self, say: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._say, self._clock = say, clock
        self._waits: list[_Wait] = []
        self._longest_s: dict[str, float] = {}
        self._told_s: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Wait for ``what`` inside; it is told after FIRST_S, or after twice the longest wait for it so far."""
        usual_s = _USUAL * self._longest_s.get(what, 0.0)
        wait = _Wait(what, self._clock(), max(FIRST_S, usual_s))
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
            waited_s = self._clock() - wait.began_s
            self._longest_s[what] = max(waited_s, self._longest_s.get(what, 0.0))

    def forget(self, name: str) -> None:
        """Forget the silence of a process that was replaced."""
        self._told_s.pop(name, None)

    def tell(self, silent: Mapping[str, float], *, limit_s: float) -> None:
        """Say what is waited for if it is time, and which processes are ``silent`` (seconds); call it now and then."""
        self._tell_silence(silent, limit_s)
        if not self._waits:
            return
        wait = self._waits[-1]
        waited_s = self._clock() - wait.began_s
        if waited_s >= wait.tell_after_s:
            wait.tell_after_s = 2 * waited_s
            self._say(f"waiting for {wait.what} for {waited_s:.0f} s")

    def _tell_silence(self, silent: Mapping[str, float], limit_s: float) -> None:
        for name, silent_s in silent.items():
            told_s = self._told_s.get(name, 0.0)
            if silent_s < told_s:
                self._say(f"{name} answers again, after more than {told_s:.0f} s")
                del self._told_s[name]
            elif silent_s >= max(min(FIRST_S, limit_s / 2), 2 * told_s):
                self._told_s[name] = silent_s
                self._say(f"waiting for {name}, which has not answered for {silent_s:.0f} s, at most {limit_s:g} s")
