"""Heartbeats: which processes of the run still answer. The driver asks; nobody else keeps time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

GROUP = "heartbeat"
"""The concurrency group for an actor's ``alive``: it has a thread of its own, so that it answers beside every call."""

_EVERY_S = 2.0
_TICK_S = 5.0


@dataclass
class _Pulse:
    actor: Any
    question: Any
    asked_s: float
    silent_s: float = 0.0
    turn_s: float = 0.0
    is_up: bool = False  # it has answered once; before that it is starting


class Patience:
    """How much of ``limit_s`` is left for one wait. Time in which the driver itself was stopped does not count."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self._waited_s = limit_s, 0.0
        self._last_s = time.monotonic()

    def is_over(self) -> bool:
        """Return whether the wait has taken ``limit_s``; call it every second or so."""
        now_s = time.monotonic()
        passed_s, self._last_s = now_s - self._last_s, now_s
        self._waited_s += min(passed_s, _TICK_S)
        return self._waited_s > self.limit_s


class Heartbeats:
    """Asks each actor again and again whether it is alive, and counts the seconds since its last answer.

    Only time in which :meth:`ask` is called counts, so a driver that was stopped itself accuses nobody. An actor that
    has not answered yet is starting, and is not silent. An actor that is dead is not silent either: its calls fail.
    """

    def __init__(self) -> None:
        self._pulses: dict[str, _Pulse] = {}
        self._last_s = time.monotonic()

    def watch(self, name: str, actor: Any) -> None:
        """Ask ``actor`` from now on, under ``name``, in place of an earlier one of that name."""
        self._pulses[name] = _Pulse(actor, _question(actor), time.monotonic())

    def forget(self, name: str) -> None:
        """Ask it no longer."""
        self._pulses.pop(name, None)

    def ask(self) -> None:
        """Take the answers that are there and ask anew. Does not block; call it every second or so."""
        now_s = time.monotonic()
        passed_s, self._last_s = min(now_s - self._last_s, _TICK_S), now_s
        for pulse in self._pulses.values():
            if ray.wait([pulse.question], timeout=0)[0]:
                self._take_answer(pulse, now_s)
            elif pulse.is_up:
                pulse.silent_s += passed_s

    def is_up(self, name: str) -> bool:
        """Return whether the actor ``name`` has answered once."""
        return name in self._pulses and self._pulses[name].is_up

    def silent(self) -> dict[str, float]:
        """Return the seconds of silence of each actor that has been up."""
        return {name: pulse.silent_s for name, pulse in self._pulses.items()}

    def turns(self) -> dict[str, float]:
        """Return for how many seconds each actor's loop has been in one turn, as of its last answer."""
        return {name: pulse.turn_s for name, pulse in self._pulses.items()}

    def _take_answer(self, pulse: _Pulse, now_s: float) -> None:
        pulse.silent_s = 0.0
        if now_s - pulse.asked_s < _EVERY_S:
            return
        try:
            pulse.turn_s = ray.get(pulse.question) or 0.0
            pulse.is_up = True
        except RayError:  # it died: whatever waits for it learns that, too
            return
        pulse.question, pulse.asked_s = _question(pulse.actor), now_s


def _question(actor: Any) -> Any:
    return actor.alive.options(concurrency_group=GROUP).remote()
