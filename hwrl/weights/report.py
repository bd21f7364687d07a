"""What a transfer cost, stage by stage."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TransferReport:
    """What one ``publish`` did.

    ``nbytes`` are the tensors' bytes, tied ones once, as each receiver got them. ``seconds`` are the host's: ``gather``
    (reading the tensors), ``rendezvous`` (waiting for the receivers), ``pack``, ``wire``, ``vote``; with the host
    transport ``claim`` (waiting for a free place), ``register`` (making and page-locking its memory) and ``copy``.
    ``receivers`` counts those that committed the version; with the host transport, those that had joined when it was
    offered. ``quarantined`` maps replicas that were excluded to the reason.
    """

    version: int
    nbytes: int
    seconds: Mapping[str, float]
    receivers: int
    quarantined: Mapping[str, str]


class StageClock:
    """Adds up the seconds of named stages; an inner stage's time is not the outer one's."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner_s = 0.0

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
