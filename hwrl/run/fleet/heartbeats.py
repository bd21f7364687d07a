"""Heartbeats: find silent processes of a run. Only the driver sends them and measures time."""

from __future__ import annotations

import time
from dataclasses import dataclass

from ray.exceptions import RayError

from hwrl.run.processes.actors import HeartbeatReply
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
    answer: Answer[HeartbeatReply]
    sent_s: float
    silent_s: float = 0.0
    reply: HeartbeatReply | None = None  # the newest; None while it is starting

    @property
    def is_up(self) -> bool:
        return self.reply is not None


class Heartbeats:
    """Sends heartbeats to each actor, and counts the seconds since its last answer.

    Time counts only between calls of :meth:`update`, so a stopped driver blames no actor afterwards. An actor
    before its first answer is starting, and is not silent. An error of Ray is no answer: the actor may be dead, or its
    machine cannot be reached for a while.
    """

    def __init__(self) -> None:
        self._heartbeats: dict[str, _Heartbeat] = {}
        self._last_s = time.monotonic()

    def watch(self, name: str, actor: ActorHandle) -> None:
        """Send heartbeats to ``actor`` from now on. It replaces an earlier actor of the same name."""
        self._heartbeats[name] = _Heartbeat(actor, actor.ping(), time.monotonic())

    def forget(self, name: str) -> None:
        """Send no more heartbeats to the actor ``name``."""
        self._heartbeats.pop(name, None)

    def update(self) -> None:
        """Read the answers and send new heartbeats. Does not block; call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = min(now_s - self._last_s, _MAX_COUNTED_S), now_s
        for heartbeat in self._heartbeats.values():
            if is_ready(heartbeat.answer) and _read(heartbeat):
                heartbeat.silent_s = 0.0
            elif heartbeat.is_up:
                heartbeat.silent_s += elapsed_s
            if is_ready(heartbeat.answer) and now_s - heartbeat.sent_s >= _INTERVAL_S:
                heartbeat.answer, heartbeat.sent_s = heartbeat.actor.ping(), now_s

    def is_up(self, name: str) -> bool:
        """Return whether the actor ``name`` has answered once."""
        return name in self._heartbeats and self._heartbeats[name].is_up

    def silent(self) -> dict[str, float]:
        """Return the seconds of silence of each actor; 0.0 during its start."""
        return {name: heartbeat.silent_s for name, heartbeat in self._heartbeats.items()}

    def loop_turns(self) -> dict[str, float]:
        """Return for how many seconds the present turn of each actor's loop has lasted, by its last answer."""
        return {name: one.reply.turn_s for name, one in self._heartbeats.items() if one.reply is not None}

    def host_of(self, name: str) -> str | None:
        """Return the name of the machine of the actor ``name``; None before its first answer."""
        reply = self._heartbeats[name].reply if name in self._heartbeats else None
        return None if reply is None else reply.host


def _read(heartbeat: _Heartbeat) -> bool:
    """Read the answer; return whether it is one."""
    try:
        heartbeat.reply = value_of(heartbeat.answer)
    except RayError:
        return False
    return True
