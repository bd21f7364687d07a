"""Tensors for collective libraries: contiguous, with a supported dtype."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from hwrl.errors import CommError, UnsupportedError

ReduceOp = Literal["sum", "max", "min"]

_REDUCE = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Every collective library moves these as they are, in every operation (one library accepts no uint8 and no 64-bit
# numbers in all_gather). Any other dtype travels as bytes, which is exact.
_MOVABLE = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int32, torch.int8})
_REDUCIBLE = frozenset({*_MOVABLE, torch.float64, torch.int64, torch.uint8})


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous ``tensor`` as a 1-d uint8 view of its memory.

    >>> raw_bytes(torch.tensor(1.0)).tolist()
    [0, 0, 128, 63]
    """
    # as_strided, because a tensor of one element is contiguous with any stride, and view() then refuses.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def movable(tensor: torch.Tensor, operation: str) -> torch.Tensor:
    """Return ``tensor`` in a dtype that every library moves: unchanged, or its bytes as int8."""
    if not tensor.is_contiguous():
        raise CommError(
            f"{operation} needs a contiguous tensor", why=f"its strides are {tensor.stride()}", fix=".contiguous()"
        )
    if tensor.dtype not in _MOVABLE:
        return raw_bytes(tensor).view(torch.int8)
    # Libraries refuse 0-d tensors. Other tensors stay as they are: a view costs as much as the rest of the call.
    return tensor if tensor.dim() else flat(tensor)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous ``tensor`` as one dimension."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def reduction(tensor: torch.Tensor, operation: str, name: ReduceOp) -> Any:
    """Return torch's reduction ``name``; raise UnsupportedError if libraries cannot reduce the tensor's dtype."""
    if tensor.dtype not in _REDUCIBLE:
        raise UnsupportedError(
            f"cannot {operation} {tensor.dtype}",
            why="collective libraries have no arithmetic for it, and adding its bytes would be wrong",
            fix="convert it first, for example to float32",
        )
    if name not in _REDUCE:
        raise CommError(
            f"cannot {operation} with {name!r}", why=f"known are {', '.join(_REDUCE)}", fix="use one of them"
        )
    return _REDUCE[name]


def check_lengths(operation: str, *, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise CommError unless ``whole`` holds exactly one ``part`` for each of ``size`` ranks."""
    if whole.numel() != part.numel() * size or whole.dtype != part.dtype:
        raise CommError(
            f"{operation} cannot match its tensors",
            why=f"{whole.numel()} of {whole.dtype} is not {size} times {part.numel()} of {part.dtype}",
            fix="the longer tensor holds one part for each rank",
        )
