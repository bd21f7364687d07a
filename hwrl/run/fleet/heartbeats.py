"""Heartbeats: the driver asks each process for an answer every two seconds, and measures the silence."""

from __future__ import annotations

import time
from dataclasses import dataclass

import ray
from ray.exceptions import RayError

from hwrl.errors import HwrlError
from hwrl.run.processes.actors import HeartbeatReply
from hwrl.run.processes.answers import Answer, is_ready, value_of
from hwrl.run.processes.handles import ActorHandle

_INTERVAL_S = 2.0
_LAST_S = 1.0
_MAX_COUNTED_S = 5.0
"""The maximum time to count between two calls. If more has passed, the driver itself was stopped for a while."""


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
class _Heartbeat:
    actor: ActorHandle
    answer: Answer[HeartbeatReply]
    sent_s: float
    silent_s: float = 0.0
    reply: HeartbeatReply | None = None  # the newest one; None while the process is starting
    is_read: bool = False  # whether the answer's warnings were taken

    @property
    def is_up(self) -> bool:
        return self.reply is not None


class Heartbeats:
    """Sends heartbeats to each actor, and counts the seconds since its last answer.

    At most five seconds are counted between two calls of :meth:`update`, so that an actor does not appear silent after
    the driver itself was stopped. Before its first answer an actor is starting, and its silence does not count. An
    error from Ray is not an answer: the actor may be dead, or its machine cannot be reached for a while.
    """

    def __init__(self) -> None:
        self._heartbeats: dict[str, _Heartbeat] = {}
        self.warnings: list[tuple[str, str]] = []
        """Actors' names and the warnings that they have logged; the reader removes them."""
        self._last_s = time.monotonic()

    def watch(self, name: str, actor: ActorHandle) -> None:
        """Send heartbeats to ``actor`` from now on, in place of an earlier actor with the same name."""
        self._heartbeats[name] = _Heartbeat(actor, actor.ping(), time.monotonic())

    def forget(self, name: str) -> None:
        """Send no more heartbeats to the actor ``name``."""
        self._heartbeats.pop(name, None)

    def update(self) -> None:
        """Read the answers that have arrived, and send new heartbeats. Does not block; call it about every second."""
        now_s = time.monotonic()
        elapsed_s, self._last_s = min(now_s - self._last_s, _MAX_COUNTED_S), now_s
        for name, heartbeat in self._heartbeats.items():
            if is_ready(heartbeat.answer) and self._read(name, heartbeat):
                heartbeat.silent_s = 0.0
            elif heartbeat.is_up:
                heartbeat.silent_s += elapsed_s
            if is_ready(heartbeat.answer) and now_s - heartbeat.sent_s >= _INTERVAL_S:
                heartbeat.answer, heartbeat.sent_s = heartbeat.actor.ping(), now_s
                heartbeat.is_read = False

    def _read(self, name: str, heartbeat: _Heartbeat) -> bool:
        """Read the reply that has arrived; return False if it is an error instead."""
        try:
            heartbeat.reply = value_of(heartbeat.answer)
        except (HwrlError, RayError):
            return False
        if not heartbeat.is_read:
            self.warnings += [(name, text) for text in heartbeat.reply.warnings]
            heartbeat.is_read = True
        return True

    def finish(self) -> None:
        """Send a last heartbeat to each actor, and read the answers that come within a second."""
        self.update()
        for heartbeat in self._heartbeats.values():
            if heartbeat.is_read:
                heartbeat.answer, heartbeat.is_read = heartbeat.actor.ping(), False
        answers = [heartbeat.answer for heartbeat in self._heartbeats.values()]
        if answers:
            ray.wait(answers, num_returns=len(answers), timeout=_LAST_S)
        self.update()

    def is_up(self, name: str) -> bool:
        """Return whether the actor ``name`` has ever answered."""
        return name in self._heartbeats and self._heartbeats[name].is_up

    def silent(self) -> dict[str, float]:
        """Return the seconds since the last answer of each actor; 0.0 before its first answer."""
        return {name: heartbeat.silent_s for name, heartbeat in self._heartbeats.items()}

    def loop_turns(self) -> dict[str, float]:
        """Return the seconds that each actor's loop has spent in its current turn, by its last answer."""
        return {name: beat.reply.turn_s for name, beat in self._heartbeats.items() if beat.reply is not None}

    def host_of(self, name: str) -> str | None:
        """Return the host name of the actor's machine; None before its first answer."""
        reply = self._heartbeats[name].reply if name in self._heartbeats else None
        return None if reply is None else reply.host
