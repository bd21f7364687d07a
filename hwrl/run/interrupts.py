"""Handle SIGINT, SIGTERM and SIGHUP, so that a run ends after its current step, with a checkpoint.

If there is nothing to save, the signal ends the run at once.
"""

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
"""timeout(1) sends its signal to the child and then to the child's process group. Both come within this time."""
_LOG_TIMEOUT_S = 0.5
"""The longest wait for the last message: printing it may block for ever on a full pipe that nobody reads."""


class Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP within a ``with`` block, in the main thread. Under nohup SIGHUP stays ignored.

    A signal sets :attr:`pending`. The attribute :attr:`defer_message` chooses what else it does:

    - None: the signal raises KeyboardInterrupt in the main thread.
    - A text: the first signal is deferred. It logs the text, and the main thread must look at ``pending`` itself. A
      second signal raises KeyboardInterrupt.

    Signals within ``SAME_SIGNAL_S`` seconds count as one. The text is logged in a thread, because the signal may have
    interrupted another output. A child process inherits these handlers between its fork and its exec. There they do
    nothing, because a signal to the process group also reaches the parent.
    """

    def __init__(self, log: Callable[[str], None] = print, *, defer_message: str | None = None) -> None:
        self.defer_message, self.pending = defer_message, False
        self._log = log
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
        """Set the handlers; call it again after a library has replaced them. Raises KeyboardInterrupt if pending."""
        for number in self._handlers_before:
            signal.signal(number, self._handle)
        if self.pending:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        if self._logging is not None:
            self._logging.join(timeout=_LOG_TIMEOUT_S)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            return
        now_s = time.monotonic()
        if now_s - self._last_signal_s < SAME_SIGNAL_S:
            return
        self._last_signal_s = now_s
        is_second, self.pending = self.pending, True
        if is_second or self.defer_message is None:
            raise KeyboardInterrupt
        text = f"{self.defer_message}; send the signal again to stop at once"
        self._logging = threading.Thread(target=self._log, args=[text], daemon=True)
        self._logging.start()
