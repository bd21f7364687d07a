"""Attention of a decode step whose few long rows do not make the short ones read as many positions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface

_NAME = "hwrl_long_rows"
_ROWS = "sdpa"

_GATHER = 3
"""The accesses to memory for one position of a long row: read, copied, and read again."""

_WORTH_NBYTES, _WORTH_LAUNCHED_NBYTES = 2 << 20, 128 << 20
"""The bytes of a layer that a division must save, because it adds operations to each layer.

One core of the demo took 0.1 ms for them, and reads 2 MiB in 0.15 ms (512 rows, two key-value heads of 32). Where the
host only launches operations, it takes about 50 us for them; a fast device reads 128 MiB in that time (an estimate).
"""


@dataclass(frozen=True)
class LongRows:
    """The division of a step: every row reads ``short`` positions, and the rows ``long`` (int64) read all of theirs."""

    short: int
    long: torch.Tensor


def find_long_rows(
    lengths: npt.NDArray[np.int64], *, position_nbytes: int, launched: bool, device: torch.device
) -> LongRows | None:
    """Return the division of rows with so many positions that reads the fewest bytes; None if it saves too few.

    A position has ``position_nbytes`` of keys and values in a layer. ``launched`` says that operations run while the
    host continues.
    """
    order = np.argsort(-lengths)
    longest, rows = int(lengths[order[0]]), len(lengths)
    reads = rows * lengths[order] + _GATHER * longest * np.arange(rows)  # with 0, 1, 2 … long rows
    count = int(reads.argmin())
    saved_nbytes = int(reads[0] - reads[count]) * position_nbytes
    if saved_nbytes < (_WORTH_LAUNCHED_NBYTES if launched else _WORTH_NBYTES):
        return None
    return LongRows(int(lengths[order[count]]), torch.from_numpy(order[:count].copy()).to(device))


_present: ContextVar[LongRows | None] = ContextVar("long_rows", default=None)


@contextmanager
def divided(model: Any, rows: LongRows | None) -> Iterator[None]:
    """Let calls of ``model`` inside the block, one new token for each row, attend by ``rows``; None changes nothing.

    A model that does not use transformers' attention interface attends as before: its results are the same.
    """
    if rows is None or not _can_divide(model):
        yield
        return
    AttentionInterface.register(_NAME, _attend)
    before, model.config._attn_implementation = model.config._attn_implementation, _NAME
    present = _present.set(rows)
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
    attend: Any = AttentionInterface()[_ROWS]
    rows = _present.get()
    if rows is None or attention_mask is None or kwargs.get("position_bias") is not None:
        whole: tuple[torch.Tensor, None] = attend(module, query, key, value, attention_mask, **kwargs)
        return whole
    short, long = rows.short, rows.long
    attended, _ = attend(
        module, query, key[:, :, :short], value[:, :, :short], attention_mask[..., :short].contiguous(), **kwargs
    )
    attended[long], _ = attend(module, query[long], key[long], value[long], attention_mask[long], **kwargs)
    return attended, None
