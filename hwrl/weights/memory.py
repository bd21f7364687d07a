"""Estimates the device memory of both ends of a weight link from a layout, for the default number of slabs."""

from __future__ import annotations

from hwrl.weights.destination import ring_nbytes_of
from hwrl.weights.layout import WeightLayout
from hwrl.weights.source import AHEAD_NBYTES

_SLABS = 4


def sender_nbytes(layout: WeightLayout, *, gathers: bool) -> int:
    """Return the largest size of a sender's ring; with ``gathers`` add the tensors that it gathers ahead."""
    largest = max((entry.nbytes for entry in layout.entries), default=0)
    ahead = min(AHEAD_NBYTES, layout.payload_nbytes) + largest
    return _ring(layout) + (ahead if gathers else 0)


def receiver_nbytes(layout: WeightLayout, *, keeps_old: bool) -> int:
    """Return the most memory of a receiver apart from its engine: a ring of slabs, or two complete versions."""
    return 2 * layout.nbytes if keeps_old else ring_nbytes_of(layout)


def _ring(layout: WeightLayout) -> int:
    return layout.largest_slab_nbytes * min(_SLABS, len(layout.slabs))
