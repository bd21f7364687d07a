"""A device without streams: :class:`StreamlessBackend`. Its streams and events wait for the whole device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from hwrl.interfaces.backend import Backend
from hwrl.interfaces.capabilities import Capability, Support


class StreamlessBackend(Backend):
    """A backend for a device without streams, to derive from instead of :class:`Backend`.

    The device does its work in the order of the calls, and may do it after they return. So each wait of a stream or an
    event is a :meth:`Backend.synchronize`, which must return only when all queued work is done.
    """

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.STREAMS:
            return Support("unsupported", "the device does its work in the order of the calls; streams are inline")
        return super().supports(capability)

    def stream(self) -> InlineStream:
        return InlineStream(self.synchronize)

    def current_stream(self) -> InlineStream:
        return InlineStream(self.synchronize)

    def event(self, *, timing: bool = False) -> InlineEvent:
        return InlineEvent(self.synchronize)


class InlineEvent:
    """A point in time. ``record`` waits for the device, so the event is reached when it returns.

    ``synchronize`` blocks until all work queued on the device is done.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._wait_for_device = synchronize
        self._at_s: float | None = None

    def record(self, stream: Any = None) -> None:
        """Wait for the device, then take the time."""
        self._wait_for_device()
        self._at_s = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Return at once: the work before the event is done."""

    def synchronize(self) -> None:
        """Return at once: the work before the event is done."""

    def query(self) -> bool:
        """Return True: the work before the event is done."""
        return True

    def elapsed_time(self, end: InlineEvent) -> float:
        """Return the milliseconds from this event to ``end``; both must have been recorded."""
        if self._at_s is None or end._at_s is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (end._at_s - self._at_s) * 1000


class InlineStream:
    """The only queue of a device, under the interface of a stream: work on it runs in program order.

    ``synchronize`` blocks until all work queued on the device is done.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._wait_for_device = synchronize

    def synchronize(self) -> None:
        """Wait for the device."""
        self._wait_for_device()

    def query(self) -> bool:
        """Wait for the device, and return True."""
        self._wait_for_device()
        return True

    def wait_event(self, event: Any) -> None:
        """Return at once: the work before the event is done."""

    def wait_stream(self, stream: Any) -> None:
        """Wait for the device."""
        self._wait_for_device()

    def record_event(self, event: InlineEvent | None = None) -> InlineEvent:
        """Record ``event``, or a new one, and return it."""
        event = event or InlineEvent(self._wait_for_device)
        event.record()
        return event

    def __enter__(self) -> InlineStream:
        return self

    def __exit__(self, *exc: object) -> None:
        """Leave the stream; what was queued stays queued."""
