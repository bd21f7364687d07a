"""Heartbeats: find silent processes of a run. Only the driver sends them and measures time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ray.exceptions import RayError

from hwrl.run.processes.answers import Answer, is_ready, value_of
from hwrl.run.processes.handles import ActorHandle

_INTERVAL_S = 2.0
_MAX_COUNTED_S = 5.0
"""The most time to count between two calls. A longer pause means a stop of the driver itself."""


class Timeout:
    """A time limit for one wait. Time in which the driver itself was stopped does not count."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._waited_s = limit_s, 0.0
        self._last_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the wait has taken ``limit_s``. Call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = now_s - self._last_s, now_s
        self._waited_s += min(elapsed_s, _MAX_COUNTED_S)
        return self._waited_s > self.limit_s


@dataclass
class _Heartbeat:
    actor: ActorHandle
    answer: Answer[float]
    sent_s: float
    silent_s: float = 0.0
    turn_s: float = 0.0
    is_up: bool = False  # whether it has answered once; it is starting before


class Heartbeats:
    """Sends heartbeats to each actor, and counts the seconds since its last answer.

    Time counts only between calls of :meth:`update`, so a stopped driver blames no actor afterwards. An actor
    before its first answer is starting, and is not silent. A dead actor is not silent either: its calls fail.
    """

    def __init__(self) -> None:
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._last_s = time.monotonic()

    def watch(self, name: str, actor: ActorHandle) -> None:
        """Send heartbeats to ``actor`` from now on. It replaces an earlier actor of the same name."""
        self._heartbeats[name] = _Heartbeat(actor, actor.alive(), time.monotonic())

    def forget(self, name: str) -> None:
        """Send no more heartbeats to the actor ``name``."""
        self._heartbeats.pop(name, None)

    def update(self) -> None:
        """Read the answers and send new heartbeats. Does not block; call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = min(now_s - self._last_s, _MAX_COUNTED_S), now_s
        for heartbeat in self._heartbeats.values():
            if is_ready(heartbeat.answer):
                self._read(heartbeat, now_s)
            elif heartbeat.is_up:
                heartbeat.silent_s += elapsed_s

    def is_up(self, name: str) -> bool:
        """Return whether the actor ``name`` has answered once."""
        return name in self._heartbeats and self._heartbeats[name].is_up

    def silent(self) -> dict[str, float]:
        """Return the seconds of silence of each actor; 0.0 during its start."""
        return {name: heartbeat.silent_s for name, heartbeat in self._heartbeats.items()}

    def loop_turns(self) -> dict[str, float]:
        """Return for how many seconds the present turn of each actor's loop has lasted, by its last answer."""
        return {name: heartbeat.turn_s for name, heartbeat in self._heartbeats.items()}

    def _read(self, heartbeat: _Heartbeat, now_s: float) -> None:
        heartbeat.silent_s = 0.0
        if now_s - heartbeat.sent_s < _INTERVAL_S:
            return
        try:
            heartbeat.turn_s = value_of(heartbeat.answer)
            heartbeat.is_up = True
        except RayError:  # it is dead, and the other calls of it fail too
            return
        heartbeat.answer, heartbeat.sent_s = heartbeat.actor.alive(), now_s
