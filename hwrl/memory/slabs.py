"""Tensors on a range of bytes, and tensors with a storage of their own bytes only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch

_Item = TypeVar("_Item")


def part_of(slab: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over ``slab`` (1-d uint8) from byte ``start``, with ``like``'s dtype, shape and strides.

    Its storage covers only its elements: torch's checkpoint writer clones a tensor on a larger storage, and keeps the
    clones until its file is complete. The tensor keeps the slab's memory alive.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    first = slab.storage_offset() + start
    storage = slab.untyped_storage()[first : first + (extent * like.element_size() if like.numel() else 0)]
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())


def place_of(slab: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a contiguous view of ``slab`` (1-d uint8) from byte ``start``, with ``like``'s dtype and shape."""
    return slab[start : start + like.nbytes].view(like.dtype).view(like.shape)


def alone(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` (contiguous, on the host) on a storage of its own elements only, in the same memory.

    Use it before ``torch.save``, which writes whole storages.
    """
    begin = int(tensor.storage_offset()) * tensor.element_size()
    storage = tensor.untyped_storage()[begin : begin + tensor.nbytes]
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, tensor.stride())


def batches(items: Iterable[_Item], nbytes_of: Callable[[_Item], int], *, nbytes: int) -> Iterator[list[_Item]]:
    """Divide ``items`` into consecutive batches of about ``nbytes``."""
    batch: list[_Item] = []
    filled = 0
    for item in items:
        batch.append(item)
        filled += nbytes_of(item)
        if filled >= nbytes:
            yield batch
            batch, filled = [], 0
    if batch:
        yield batch
