"""The memory of both ends of a weight link, before there is one."""

from __future__ import annotations

from hwrl.weights.destination import ring_nbytes_of
from hwrl.weights.layout import WeightLayout
from hwrl.weights.source import AHEAD_NBYTES

_SLABS = 4


def sender_nbytes(layout: WeightLayout, *, gathers: bool) -> int:
    """Return the most bytes of a sender's ring; with ``gathers`` also of the tensors that it gathers ahead."""
    largest = max((entry.nbytes for entry in layout.entries), default=0)
    ahead = min(AHEAD_NBYTES, layout.payload_nbytes) + largest
    return _ring(layout) + (ahead if gathers else 0)


def receiver_nbytes(layout: WeightLayout, *, keeps_old: bool) -> int:
    """Return the most bytes of a receiver beside its engine: a ring of slabs, or two whole versions."""
    return 2 * layout.nbytes if keeps_old else ring_nbytes_of(layout)


def _ring(layout: WeightLayout) -> int:
    largest = max((slab.nbytes for slab in layout.slabs), default=0)
    return largest * min(_SLABS, len(layout.slabs))
