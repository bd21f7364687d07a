"""Attention of a decode step, faster if a few rows are much longer than the others.

A batch has one length: without this, every short row reads as many cached positions as the longest row.
"""

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
_WHOLE = "sdpa"
"""The attention in transformers that computes each part."""

_GATHER = 3
"""A long row costs this many memory accesses per position: a read and a write for its copy, and a read of the copy."""

_WORTH_NBYTES, _WORTH_LAUNCHED_NBYTES = 2 << 20, 128 << 20
"""The bytes that a division must save in each layer, because it adds operations to each layer. The second number is
for devices where the host only launches operations.

One CPU core takes 0.1 ms for the added operations. It reads 2 MiB in 0.15 ms (measured with the demo: 512 rows, two
key-value heads of size 32). A host launches them in about 50 us. A fast device reads 128 MiB in that time (an
estimate).
"""


@dataclass(frozen=True)
class LongRows:
    """How to divide a step: all rows read ``short`` positions; then the rows ``long`` (int64) read all of theirs."""

    short: int
    long: torch.Tensor


def find_long_rows(
    lengths: npt.NDArray[np.int64], *, position_nbytes: int, launched: bool, device: torch.device
) -> LongRows | None:
    """Return the division that reads the fewest bytes; None if it saves too few of them.

    ``lengths`` are the rows' numbers of positions. A position has ``position_nbytes`` of keys and values in a layer.
    ``launched`` is true if the host only launches operations, and the device runs them later.
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
    """Divide the attention of ``model`` by ``rows`` inside the block; None changes nothing.

    Each call of the model must have one new token for each row. The results are the same but for rounding. A model
    without transformers' attention interface is not divided.
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
    attend: Any = AttentionInterface()[_WHOLE]
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
