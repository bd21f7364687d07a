"""SIGINT, SIGTERM and SIGHUP: they end a run after its step, with a checkpoint, or at once if nothing is to save."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SIGNAL_S = 0.5
"""timeout(1) signals its child first, and then the child's process group; the two signals are closer than this."""


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP within a ``with`` block, in the main thread. Under nohup SIGHUP stays ignored.

    A signal sets ``pending`` and raises KeyboardInterrupt. While ``message`` is set, the first signal does not raise:
    it only logs the message. It does so in a thread, because the signal may interrupt another output. Signals within
    ``same_signal_s`` seconds count as one. A child has these handlers, too, between its fork and its exec. There they
    ignore signals: a signal for the process group also reaches the parent.
    """

    def __init__(
        self,
        log: Callable[[str], None] = print,
        *,
        message: str | None = None,
        same_signal_s: float = SAME_SIGNAL_S,
    ) -> None:
        self.defer_message, self.pending = message, False
        self._log, self._same_signal_s = log, same_signal_s
        self._last_signal_s = float("-inf")
        self._logging: threading.Thread | None = None
        self._pid = os.getpid()

    def __enter__(self) -> Interrupts:
        before: dict[int, Any] = {number: signal.getsignal(number) for number in _SIGNALS}
        if before[signal.SIGHUP] is signal.SIG_IGN:
            del before[signal.SIGHUP]
        self._handlers_before = before
        self.install_handlers()
        return self

    def install_handlers(self) -> None:
        """Set the handlers, also after a library has set its own. Raises KeyboardInterrupt if a signal is pending."""
        for number in self._handlers_before:
            signal.signal(number, self._handle)
        if self.pending:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._logging is not None:
            self._logging.join(timeout=SAME_SIGNAL_S)  # it may block for ever on a full pipe without a reader

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        now_s = time.monotonic()
        if now_s - self._last_signal_s < self._same_signal_s:
            return
        self._last_signal_s = now_s
        again, self.pending = self.pending, True
        if again or self.defer_message is None:
            raise KeyboardInterrupt
        text = f"{self.defer_message}; once more to stop at once"
        self._logging = threading.Thread(target=self._log, args=[text], daemon=True)
        self._logging.start()
