"""What a transfer cost, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hwrl.interfaces import Backend


@dataclass(frozen=True)
class TransferReport:
    """What one ``publish`` did.

    ``nbytes`` are the tensors' bytes, tied ones once, as each receiver got them. ``transfer_s`` is the time between
    the first and the last of them on this process's device, measured there; 0.0 if nothing was sent. ``seconds`` are
    the host's: ``gather`` (reading the tensors), ``rendezvous`` (waiting for the receivers), ``pack``, ``wire``,
    ``vote``; with the host transport ``claim`` (waiting for a free place), ``register`` (making and page-locking
    its memory) and ``copy``. ``receivers`` counts those that committed the version; with the host transport, those
    that had joined when it was offered. ``excluded`` maps replicas that were excluded to the reason.
    """

    version: int
    nbytes: int
    seconds: Mapping[str, float]
    receivers: int
    excluded: Mapping[str, str]
    transfer_s: float = 0.0


class StageClock:
    """Adds up the seconds of named stages; an inner stage's time is not the outer one's.

    ``span`` measures on the device, by events: what is queued inside it, however early the host goes on.
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
