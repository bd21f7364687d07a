"""Attention of a decode step in ranges of rows, so that short rows do not read as many positions as the longest row.

A batch has one length: without ranges, every row reads as many cached positions as the longest one. The rows are kept
about in the order of their lengths, longest first. All running rows grow by one token in each step, so this order
stays; only new rows and ended ones disturb it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

_NAME = "hwrl_row_ranges"
_WHOLE = "sdpa"
"""The attention in transformers that computes each range."""

_MOVE = 3
"""A moved row costs this many memory accesses per position: a read and a write for a copy, and a write of the copy."""
_STEPS = 4
"""A move must pay within this number of steps, because rows end and others come."""

_WORTH_NBYTES, _WORTH_LAUNCHED_NBYTES = 2 << 20, 128 << 20
"""The bytes that a further range must save in each layer, because it adds operations to each layer. The second number
is for devices where the host only launches operations.

One CPU core takes 0.1 ms for the added operations. It reads 2 MiB in 0.15 ms (measured with the demo: 512 rows, two
key-value heads of size 32). A host launches them in about 50 us. A fast device reads 128 MiB in that time (an
estimate).
"""


@dataclass(frozen=True)
class RowRange:
    """Rows that read the first ``positions`` cached positions."""

    rows: slice
    positions: int


@dataclass(frozen=True)
class RowMoves:
    """Rows to move before a step: the row of each of the ``sources`` goes to the place in ``targets``, all at once."""

    sources: list[int]
    targets: list[int]


class RowRanges:
    """Divides the rows of a step so that its attention reads few bytes.

    A position has ``position_nbytes`` of keys and values in a layer. ``launched`` is true if the host only launches
    operations, and the device runs them later.
    """

    def __init__(self, *, position_nbytes: int, launched: bool) -> None:
        self._position_nbytes = position_nbytes
        self._worth_nbytes = _WORTH_LAUNCHED_NBYTES if launched else _WORTH_NBYTES

    def find_moves(self, lengths: npt.NDArray[np.int64]) -> RowMoves | None:
        """Return the moves that bring rows of about the same length together; None if they cost more than they save.

        ``lengths`` are the rows' numbers of positions.
        """
        ordered = self.find_ranges(-np.sort(-lengths))
        places = np.repeat(np.arange(len(ordered)), [_count(one) for one in ordered])  # the range of each place
        belongs = np.searchsorted([-one.positions for one in ordered], -lengths, side="right") - 1  # and of each row
        misplaced = np.flatnonzero(places != belongs)
        if not len(misplaced):
            return None
        saved_nbytes = _STEPS * (_reads(self.find_ranges(lengths)) - _reads(ordered)) * self._position_nbytes
        moved_nbytes = _MOVE * len(misplaced) * int(lengths[misplaced].max()) * self._position_nbytes
        if saved_nbytes < moved_nbytes + self._worth_nbytes:
            return None
        sources = misplaced[np.argsort(belongs[misplaced], kind="stable")]
        targets = misplaced[np.argsort(places[misplaced], kind="stable")]
        return RowMoves(sources.tolist(), targets.tolist())

    def find_ranges(self, lengths: npt.NDArray[np.int64]) -> list[RowRange]:
        """Return the ranges of the rows in their present order, from the first row to the last; often only one."""
        reach = np.maximum.accumulate(lengths[::-1])[::-1]  # the longest of each row and those after it
        starts = self._starts(reach)
        ends = [*starts[1:], len(lengths)]
        return [RowRange(slice(start, end), int(reach[start])) for start, end in zip(starts, ends, strict=True)]

    def _starts(self, falling: npt.NDArray[np.int64]) -> list[int]:
        """Return the first row of each range; ``falling`` are lengths, longest first."""
        starts, open_ranges = [0], [(0, len(falling))]
        while open_ranges:
            start, end = open_ranges.pop()
            saved = (falling[start] - falling[start:end]) * (end - np.arange(start, end))
            best = int(saved.argmax())
            if best and int(saved[best]) * self._position_nbytes >= self._worth_nbytes:
                starts.append(start + best)
                open_ranges += [(start, start + best), (start + best, end)]
        return sorted(starts)


def _count(one: RowRange) -> int:
    return int(one.rows.stop - one.rows.start)


def _reads(ranges: Sequence[RowRange]) -> int:
    return sum(_count(one) * one.positions for one in ranges)


_present: ContextVar[Sequence[RowRange]] = ContextVar("row_ranges", default=())


@contextmanager
def divided(model: Any, ranges: Sequence[RowRange]) -> Iterator[None]:
    """Divide the attention of ``model`` into ``ranges`` inside the block; one range changes nothing.

    Each call of the model must have one new token for each row. The results are the same but for rounding. A model
    without transformers' attention interface is not divided.
    """
    if len(ranges) < 2 or not _can_divide(model):
        yield
        return
    AttentionInterface.register(_NAME, _attend)
    before, model.config._attn_implementation = model.config._attn_implementation, _NAME
    present = _present.set(ranges)
    try:
        yield
    finally:
        _present.reset(present)
        model.config._attn_implementation = before


def _can_divide(model: Any) -> bool:
    kinds = [kind for kind in type(model).__mro__ if kind.__module__.startswith("transformers.models.")]
    return bool(kinds) and bool(kinds[0]._can_set_attn_implementation())  # type: ignore[attr-defined] # transformers'


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend from the one query of each row (rows × heads × 1 × size); return rows × 1 × heads × size."""
    attend: Any = AttentionInterface()[_WHOLE]
    ranges = _present.get()
    if not ranges or attention_mask is None or kwargs.get("position_bias") is not None:
        whole: tuple[torch.Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
        return whole
    parts = []
    for one in ranges:
        rows, used = one.rows, slice(one.positions)
        mask = attention_mask[rows, ..., used].contiguous()
        attended, _ = attend(module, query[rows], key[rows, :, used], value[rows, :, used], mask, **kwargs)
        parts.append(attended)
    return torch.cat(parts), None
