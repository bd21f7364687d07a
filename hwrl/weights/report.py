"""The cost of a transfer, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hwrl.interfaces import Backend


@dataclass(frozen=True)
class TransferReport:
    """The result of one ``publish``.

    ``nbytes`` are the bytes of the version's tensors, counting tied tensors once, even if nobody received them.
    ``transfer_s`` is the time from the first to the last of them on this process's device, measured by its events; 0.0
    if nothing was sent.

    ``seconds`` maps stages to the host's seconds: ``gather`` (reading the tensors), ``rendezvous`` (waiting for the
    receivers), ``pack``, ``wire`` and ``vote``. The host transport has ``claim`` (waiting for a free file),
    ``register`` (making a file and page-locking its memory) and ``copy``. A receiver's
    :class:`~hwrl.weights.Received` has ``wait``, too.

    ``receivers`` counts the members that have voted "whole"; with the host transport, the members when the version was
    stored. ``excluded`` maps replicas that were excluded or have not joined to the reason. Those ``left_out`` have
    joined, but were not ready in time or have joined again after a failure; they get the next version.

    ``changed_share`` is the share of the version's checksums, one for each 32 KiB, that differ from the version before:
    0.0 if all bits are the same, 1.0 for a sender's first version. None if that is unknown: nobody received the
    version, or it has no bytes.
    """

    version: int
    nbytes: int
    seconds: Mapping[str, float]
    receivers: int
    excluded: Mapping[str, str]
    left_out: Sequence[str] = ()
    transfer_s: float = 0.0
    changed_share: float | None = None


class StageClock:
    """Adds up the seconds of named stages. The time of an inner stage does not count for the outer one.

    ``span`` measures on the device by events. So it measures the operations queued inside it, even if the host has
    queued them long before they run.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner_s = 0.0
        self._events: tuple[Any, Any] | None = None

    @contextlib.contextmanager
    def span(self, backend: Backend) -> Iterator[None]:
        """Measure the operations queued on the current stream inside the context.

        A span left by an exception does not count.
        """
        begin, end, stream = backend.event(timing=True), backend.event(timing=True), backend.current_stream()
        begin.record(stream)
        yield
        end.record(stream)
        self._events = begin, end

    def forget_spans(self) -> None:
        """Forget the spans so far, because another attempt begins."""
        self._events = None

    def span_s(self) -> float:
        """Return the seconds of the spans, 0.0 if there was none. Blocks until the device has reached their end."""
        if self._events is None:
            return 0.0
        begin, end = self._events
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1000

    @contextlib.contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Count the seconds inside the context for ``stage``."""
        outer_s, self._inner_s = self._inner_s, 0.0
        begin = time.perf_counter()
        try:
            yield
        finally:
            passed_s = time.perf_counter() - begin
            self.seconds[stage] = self.seconds.get(stage, 0.0) + passed_s - self._inner_s
            self._inner_s = outer_s + passed_s
