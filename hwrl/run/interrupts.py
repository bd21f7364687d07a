"""SIGINT and SIGTERM: they end a run after its step, with a checkpoint, or at once where there is nothing to save."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM)
_ONE_SIGNAL_S = 0.5  # timeout(1) sends one to its child, and then to the process group that the child is in


class Interrupts:
    """Takes SIGINT and SIGTERM while it is entered, in the main thread.

    A signal raises KeyboardInterrupt. Where ``patient`` is set the first one only sets ``pending``, and is answered
    with ``say``. What a wrapper sends twice counts once.
    """

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self.patient = self.pending = False
        self._say = say
        self._heard_s = float("-inf")

    def __enter__(self) -> Interrupts:
        self._before: dict[int, Any] = {number: signal.getsignal(number) for number in _NUMBERS}
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals, also back from a library that has set handlers of its own."""
        for number in _NUMBERS:
            signal.signal(number, self._hear)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s < _ONE_SIGNAL_S:
            return
        self._heard_s = now_s
        if self.pending or not self.patient:
            raise KeyboardInterrupt
        self.pending = True
        self._say("stopping after this step, with a checkpoint; once more to stop at once")
