"""SIGINT, SIGTERM, SIGHUP: they end a run after its step, with a checkpoint, or at once with nothing to save."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_SIGNAL_S = 0.5  # timeout(1) sends one to its child, and then to the process group that the child is in


class Interrupts:
    """Takes SIGINT, SIGTERM and, unless it is ignored as under nohup, SIGHUP while it is entered, in the main thread.

    A signal sets ``pending`` and raises KeyboardInterrupt. While there is an ``answer`` the first one does not raise,
    and is answered with that through ``say``, in a thread: the signal may have come in the midst of another output.
    What a wrapper sends twice counts once.
    """

    def __init__(self, say: Callable[[str], None] = print, *, answer: str | None = None) -> None:
        self.answer, self.pending = answer, False
        self._say = say
        self._heard_s = float("-inf")
        self._answering: threading.Thread | None = None

    def __enter__(self) -> Interrupts:
        before: dict[int, Any] = {number: signal.getsignal(number) for number in _NUMBERS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]
        self._before = before
        self.listen()
        return self

    def listen(self) -> None:
        """Take the signals, also back from a library that has set handlers of its own; raise if one is pending."""
        for number in self._before:
            signal.signal(number, self._hear)
        if self.pending:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._answering is not None:
            self._answering.join(timeout=_ONE_SIGNAL_S)  # a pipe that nobody reads may be full

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if now_s - self._heard_s < _ONE_SIGNAL_S:
            return
        self._heard_s = now_s
        again, self.pending = self.pending, True
        if again or self.answer is None:
            raise KeyboardInterrupt
        text = f"{self.answer}; once more to stop at once"
        self._answering = threading.Thread(target=self._say, args=[text], daemon=True)
        self._answering.start()
