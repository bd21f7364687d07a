"""Log long waits and silent processes, so that the user sees what a run waits for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

FIRST_S = 10.0
"""A wait or a silence is logged after this time, and again whenever it has lasted twice as long."""
_LONGEST_S = 55.0
"""The longest time without a line, over all waits. A run promises 60 s, and the log is updated about every second."""
_USUAL_FACTOR = 2.0
"""A wait is logged only when it exceeds the longest earlier wait for the same subject by this factor."""


@dataclass
class _Wait:
    subject: str
    began_s: float
    log_after_s: float


class WaitLog:
    """Logs the waits of a run. Waits may be nested; only the innermost one is logged. ``clock`` returns seconds."""

    def __init__(self, log: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock = log, clock
        self._waits: list[_Wait] = []
        self._longest_s: dict[str, float] = {}
        self._last_line_s = clock()
        self._logged_silence_s: dict[str, float] = {}

    @contextmanager
    def waiting_for(self, subject: str) -> Iterator[None]:
        """Log that the run is waiting for ``subject`` if the block takes longer than usual.

        The limit is ``FIRST_S``, or twice the longest earlier wait for ``subject`` if that is more. The wait is also
        logged if the user has seen no line for 55 s: neither a wait nor, by :meth:`note_progress`, a finished step.
        """
        usual_s = _USUAL_FACTOR * self._longest_s.get(subject, 0.0)
        wait = _Wait(subject, self._clock(), max(FIRST_S, usual_s))
        self._waits.append(wait)
        try:
            yield
        finally:
            self._waits.remove(wait)
            waited_s = self._clock() - wait.began_s
            self._longest_s[subject] = max(waited_s, self._longest_s.get(subject, 0.0))

    def note_progress(self) -> None:
        """Note that the run shows its progress now."""
        self._last_line_s = self._clock()

    def forget(self, process: str) -> None:
        """Forget how long ``process`` was silent, because it has been replaced."""
        self._logged_silence_s.pop(process, None)

    def update(self, silent: Mapping[str, float], *, limit_s: float) -> None:
        """Log the current wait and the silent processes, if they are due. Call it about every second.

        ``silent`` has the seconds since the last answer of each process. ``limit_s`` is the maximum, for the log line.
        """
        self._log_silence(silent, limit_s)
        if not self._waits:
            return
        wait = self._waits[-1]
        now_s = self._clock()
        waited_s = now_s - wait.began_s
        if waited_s >= wait.log_after_s or now_s - self._last_line_s >= _LONGEST_S:
            wait.log_after_s, self._last_line_s = max(wait.log_after_s, 2 * waited_s), now_s
            self._log(f"waiting for {wait.subject} for {waited_s:.0f} s")

    def _log_silence(self, silent: Mapping[str, float], limit_s: float) -> None:
        for process, silent_s in silent.items():
            logged_s = self._logged_silence_s.get(process, 0.0)
            if silent_s < logged_s:
                self._log(f"{process} answers again, after more than {logged_s:.0f} s")
                del self._logged_silence_s[process]
            elif silent_s >= max(min(FIRST_S, limit_s / 2), 2 * logged_s):
                self._logged_silence_s[process] = silent_s
                self._log(f"waiting for {process}: no answer for {silent_s:.0f} s (limit {limit_s:g} s)")
