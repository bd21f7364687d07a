"""Streams and events of a synchronous device: work is done when a call returns."""

from __future__ import annotations

import time
from typing import Any


class InlineEvent:
    """A point in time; reached as soon as it is recorded."""

    def __init__(self) -> None:
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: the work before the event is done."""

    def synchronize(self) -> None:
        """Return at once: the work before the event is done."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: InlineEvent) -> float:
        """Return the milliseconds from this event to ``end``; both must have been recorded."""
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end._at_s - self._at_s) * 1000


class InlineStream:
    """A queue that is always empty: work runs in the calling thread, in program order."""

    def synchronize(self) -> None:
        """Return at once: the queue is empty."""

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None:
        """Return at once: the marked work is done."""

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream's work is done."""

    def record_event(self, event: InlineEvent | None = None) -> InlineEvent:
        event = event or InlineEvent()
        event.record()
        return event

    def __enter__(self) -> InlineStream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the stream; nothing is pending."""
