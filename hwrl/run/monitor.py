"""The driver's monitor of its processes: heartbeats, and log lines about long waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayError

from hwrl.errors import HwrlError
from hwrl.run.remote import Answer, HeartbeatReply, Remote, is_ready, value_of

FIRST_S = 10.0
"""A wait or a silence is logged after this time, and again whenever it has lasted twice as long."""
_LONGEST_S = 55.0
"""The longest time without a line, over all waits. A run promises 60 s, and the log is updated about every second."""
_USUAL_FACTOR = 2.0
"""A wait is logged only when it exceeds the longest earlier wait for the same subject by this factor."""
_INTERVAL_S = 2.0
_LAST_S = 1.0
_MAX_COUNTED_S = 5.0
"""The maximum time to count between two calls. If more has passed, the driver itself was stopped for a while."""
_MOST_WARNINGS = 500
"""The maximum number of warnings in the log of a run."""


class Timeout:
    """A time limit for one wait. Time during which the driver itself was stopped does not count."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._waited_s = limit_s, 0.0
        self._last_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the wait has lasted for ``limit_s``. Call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._waited_s += min(elapsed_s, _MAX_COUNTED_S)
        return self._waited_s > self.limit_s


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


@dataclass
class _Heartbeat:
    actor: Remote[Any]
    answer: Answer[HeartbeatReply]
    sent_s: float
    silent_s: float = 0.0
    reply: HeartbeatReply | None = None  # the newest one; None while the process is starting
    is_read: bool = False  # whether the answer's warnings were taken


class ProcessMonitor:
    """Sends heartbeats to the processes of a run, by name, and counts the seconds since the last answer of each.

    A process is unresponsive if it does not answer for ``heartbeat_s``. At most five seconds are counted between two
    calls of :meth:`update`, so that no process appears silent after the driver itself was stopped. Before its first
    answer a process is starting, and its silence does not count. An error from Ray is not an answer: the process may
    be dead, or its machine cannot be reached for a while.

    With ``names_hosts``, log lines include the machine of each process. ``log`` gets the warnings of the processes,
    each once, however many of them have it. :attr:`waits` logs long waits, and silent processes, with ``kind="wait"``.
    """

    def __init__(self, *, heartbeat_s: float, log: Callable[..., None], names_hosts: bool = False) -> None:
        self._heartbeat_s, self._log, self._names_hosts = heartbeat_s, log, names_hosts
        self._warned: set[str] = set()
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._last_s = time.monotonic()
        self.waits = WaitLog(partial(log, kind="wait"))

    def watch(self, name: str, actor: Remote[Any]) -> None:
        """Watch ``actor``, in place of an earlier one of the same name."""
        self._heartbeats[name] = _Heartbeat(actor, actor.ping(), time.monotonic())

    def forget(self, name: str) -> None:
        """Stop watching the process ``name``."""
        self.waits.forget(self.locate(name))
        self._heartbeats.pop(name, None)

    def update(self) -> None:
        """Read and send heartbeats, and log long waits. Does not block; call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = min(now_s - self._last_s, _MAX_COUNTED_S), now_s
        for name, heartbeat in self._heartbeats.items():
            if is_ready(heartbeat.answer) and self._read(name, heartbeat):
                heartbeat.silent_s = 0.0
            elif heartbeat.reply is not None:
                heartbeat.silent_s += elapsed_s
            if is_ready(heartbeat.answer) and now_s - heartbeat.sent_s >= _INTERVAL_S:
                heartbeat.answer, heartbeat.sent_s = heartbeat.actor.ping(), now_s
                heartbeat.is_read = False
        silent = {self.locate(name): heartbeat.silent_s for name, heartbeat in self._heartbeats.items()}
        self.waits.update(silent, limit_s=self._heartbeat_s)

    def _read(self, name: str, heartbeat: _Heartbeat) -> bool:
        """Read the reply that has arrived, and log its warnings; return False if it is an error instead."""
        try:
            heartbeat.reply = value_of(heartbeat.answer)
        except (HwrlError, RayError):
            return False
        for text in () if heartbeat.is_read else heartbeat.reply.warnings:
            if text not in self._warned and len(self._warned) <= _MOST_WARNINGS:
                self._warned.add(text)
                is_last = len(self._warned) > _MOST_WARNINGS
                self._log("further warnings are not shown" if is_last else f"warning: {self.locate(name)}: {text}")
        heartbeat.is_read = True
        return True

    def finish(self) -> None:
        """Log the last warnings of the processes that answer within a second. Call it before they end."""
        self.update()
        for heartbeat in self._heartbeats.values():
            if heartbeat.is_read:
                heartbeat.answer, heartbeat.is_read = heartbeat.actor.ping(), False
        answers = [heartbeat.answer for heartbeat in self._heartbeats.values()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_LAST_S)
        self.update()

    def is_up(self, name: str) -> bool:
        """Return whether the process has answered a heartbeat: its start is over."""
        return self._reply_of(name) is not None

    def loop_turn_s(self, name: str) -> float:
        """Return the seconds that the process's loop has spent in its current turn, by the newest heartbeat."""
        reply = self._reply_of(name)
        return 0.0 if reply is None else reply.turn_s

    def locate(self, name: str) -> str:
        """Return ``name`` with its machine, such as "replica-1 on host3"; only ``name`` if the machine is not known."""
        reply = self._reply_of(name) if self._names_hosts else None
        return name if reply is None else f"{name} on {reply.host}"

    def _reply_of(self, name: str) -> HeartbeatReply | None:
        return self._heartbeats[name].reply if name in self._heartbeats else None

    def unresponsive(self) -> dict[str, str]:
        """Return the processes that have not answered for too long, each with the reason as text."""
        return {
            name: f"it has not answered for timeouts.heartbeat_s={self._heartbeat_s:g} s"
            for name, heartbeat in self._heartbeats.items()
            if heartbeat.silent_s > self._heartbeat_s
        }
