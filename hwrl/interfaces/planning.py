"""How engines predict their memory before they exist: :class:`MemoryCause`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Phase = Literal["idle", "step", "transfer"]
"""What a process does: it waits, it trains or generates, or it takes part in an update of the weights."""
Place = Literal["device", "host"]

ALWAYS: tuple[Phase, ...] = ("idle", "step", "transfer")
ACTIVE: tuple[Phase, ...] = ("step", "transfer")


@dataclass(frozen=True)
class MemoryCause:
    """The ``nbytes`` that one process holds on ``place`` for ``cause``, a few words, during ``phases``.

    A ``certain`` number follows from shapes alone, and the process cannot need less. Others are estimates.
    """

    cause: str
    nbytes: int
    place: Place = "device"
    phases: tuple[Phase, ...] = ALWAYS
    certain: bool = True


def phase_nbytes(causes: Iterable[MemoryCause], phase: Phase, *, place: Place = "device") -> int:
    """Return the bytes on ``place`` in ``phase``."""
    return sum(one.nbytes for one in causes if one.place == place and phase in one.phases)


def peak_phase(causes: Iterable[MemoryCause], *, place: Place = "device") -> Phase:
    """Return the phase with the most bytes on ``place``."""
    known = list(causes)
    return max(ALWAYS, key=lambda phase: phase_nbytes(known, phase, place=place))
