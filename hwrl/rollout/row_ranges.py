"""Attention of a decode step in ranges of rows, so that short rows do not read as many positions as the longest row.

A batch has one length: without ranges, every row reads as many cached positions as the longest one. The rows are kept
about in the order of their lengths, longest first. All running rows grow by one token in each step, so this order
stays; only new rows and ended ones disturb it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

_NAME = "hwrl_row_ranges"
_WHOLE = "sdpa"
"""The attention in transformers that computes each range."""

_MOVE = 4
"""A moved row costs as much as this many reads per position: a read and a write for a copy, and the same back."""
_MOST = 4
"""The most ranges: each has fewer rows, and a device may not be full with few rows."""

_WORTH_NBYTES, _WORTH_LAUNCHED_NBYTES = 2 << 20, 128 << 20
"""The bytes that a further range, or a move, must save in each layer, because it adds operations to each layer. The
second number is for devices where the host only launches operations.

One CPU core takes 0.1 ms for the operations of a range. It reads 2 MiB in 0.15 ms (measured with the demo: 512 rows,
two key-value heads of size 32). A host launches them in about 50 us. A fast device reads 128 MiB in that time (an
estimate).
"""


@dataclass(frozen=True)
class RowRange:
    """Rows that read the first ``positions`` cached positions."""

    rows: slice
    positions: int


@dataclass(frozen=True)
class RowDivision:
    """How a step's attention is divided: first the rows ``sources`` go to the places ``targets``, all at once.

    ``ranges`` go from the first row to the last, and the first one has the longest row. One range: nothing is divided.
    """

    ranges: list[RowRange]
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)


class RowDivider:
    """Divides the rows of each step so that its attention reads few bytes.

    Rows move once the reads that their order has wasted are as many as those of the move. So no more than twice as many
    are spent as by someone who knows how long the rows will run (the ski rental problem: Karlin, Manasse, Rudolph and
    Sleator, Competitive Snoopy Caching, 1988).

    ``launched`` is true if the host only launches operations, and the device runs them later.
    """

    def __init__(self, *, launched: bool) -> None:
        self._worth_nbytes = _WORTH_LAUNCHED_NBYTES if launched else _WORTH_NBYTES
        self._wasted = 0  # reads of positions since the last move

    def divide(self, lengths: npt.NDArray[np.int64], *, position_nbytes: int) -> RowDivision:
        """Return the division of the next step, for rows with these numbers of positions (at least one row).

        A position has ``position_nbytes`` of keys and values in a layer.
        """
        worth = -(-self._worth_nbytes // max(1, position_nbytes))
        ordered = _divide(-np.sort(-lengths), worth=worth)
        range_of_place = np.repeat(np.arange(len(ordered)), [_count(one) for one in ordered])
        # Equal lengths are always in one range, so each row belongs to the last range that is long enough.
        range_of_row = np.searchsorted([-one.positions for one in ordered], -lengths, side="right") - 1
        misplaced = np.flatnonzero(range_of_place != range_of_row)
        if not len(misplaced):
            self._wasted = 0
            return RowDivision(ordered)
        reach = np.maximum.accumulate(lengths[::-1])[::-1]  # the longest of each row and those after it
        present = _divide(reach, worth=worth)
        self._wasted += _reads(present) - _reads(ordered)
        if self._wasted < worth + _MOVE * len(misplaced) * int(lengths[misplaced].max()):
            return RowDivision(present)
        self._wasted = 0
        sources = misplaced[np.argsort(range_of_row[misplaced], kind="stable")]
        targets = misplaced[np.argsort(range_of_place[misplaced], kind="stable")]
        return RowDivision(ordered, sources.tolist(), targets.tolist())


def _divide(falling: npt.NDArray[np.int64], *, worth: int) -> list[RowRange]:
    """Divide rows of lengths that never rise.

    Each further range starts where it saves the most reads, if these are at least ``worth``.
    """
    starts = [0]
    while len(starts) < _MOST:
        saved, start = max(_best_split(falling, *bounds) for bounds in pairwise([*starts, len(falling)]))
        if saved < worth:
            break
        starts = sorted([*starts, start])
    return [RowRange(slice(start, end), int(falling[start])) for start, end in pairwise([*starts, len(falling)])]


def _best_split(falling: npt.NDArray[np.int64], start: int, end: int) -> tuple[int, int]:
    """Return the most reads that a new range within these rows saves, and its first row."""
    saved = (falling[start] - falling[start:end]) * np.arange(end - start, 0, -1)
    best = int(saved.argmax())
    return int(saved[best]), start + best


def _count(one: RowRange) -> int:
    return int(one.rows.stop - one.rows.start)


def _reads(ranges: Sequence[RowRange]) -> int:
    return sum(_count(one) * one.positions for one in ranges)


_present: ContextVar[Sequence[RowRange]] = ContextVar("row_ranges", default=())


@contextmanager
def divided(model: Any, ranges: Sequence[RowRange]) -> Iterator[None]:
    """Divide the attention of ``model`` into ``ranges`` inside the block; one range changes nothing.

    Only for a model that :func:`~hwrl.models.uses_attention_interface` accepts. Each call of the model must have one
    new token for each row. The results are the same but for rounding.
    """
    if len(ranges) == 1:
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
