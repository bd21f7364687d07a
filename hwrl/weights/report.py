"""The cost of a transfer, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwrl.interfaces import Backend


@dataclass(frozen=True)
class TransferReport:
    """The result of one ``publish``.

    ``nbytes`` are the tensors' bytes, tied ones once, as each receiver got them. ``transfer_s`` is the time between
    the first and the last of them on this process's device, measured there; 0.0 if nothing was sent. ``seconds`` are
    the host's: ``gather`` (reading the tensors), ``rendezvous`` (waiting for the receivers), ``pack``, ``wire``,
    ``vote``; with the host transport ``claim`` (waiting for a free place), ``register`` (making and page-locking
    its memory) and ``copy``. ``receivers`` counts commits of the version; with the host transport, receivers
    joined by then. ``excluded`` maps excluded replicas to the reason.
    """

    version: int
    nbytes: int
    seconds: Mapping[str, float]
    receivers: int
    excluded: Mapping[str, str]
    transfer_s: float = 0.0


class StageClock:
    """Adds up the seconds of named stages; an inner stage's time is not the outer one's.

    ``span`` measures on the device, by events: the operations queued inside it, even if the host is ahead of them.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner_s = 0.0
        self._events: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def span(self, backend: Backend) -> Iterator[None]:
        """Measure from here to the context's end on the current stream; only the last span counts."""
        begin, end, stream = backend.event(timing=True), backend.event(timing=True), backend.current_stream()
        begin.record(stream)
        yield
        end.record(stream)
        self._events = begin, end

    def span_s(self) -> float:
        """Return the span's seconds, blocking until it is over on the device; 0.0 if there was none."""
        if self._events is None:
            return 0.0
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the seconds until the context ends as ``stage``'s."""
        outer_s, self._inner_s = self._inner_s, 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            passed_s = time.perf_counter() - begin
            self.seconds[stage] = self.seconds.get(stage, 0.0) + passed_s - self._inner_s
            self._inner_s = outer_s + passed_s
