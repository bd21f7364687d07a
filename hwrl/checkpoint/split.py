"""Split the item of a large tensor into items of a bounded size: :func:`split_item`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hwrl.checkpoint.shards import Offset

MAX_ITEM_NBYTES = 32 << 20
"""The largest item. Each writing thread of a save reads one item at a time, and a load reads one into memory."""


def split_item(item: WriteItem, *, max_nbytes: int = MAX_ITEM_NBYTES) -> Iterator[tuple[Offset, WriteItem]]:
    """Split ``item`` into items of at most ``max_nbytes`` each.

    Yields each with its offset in the rank's local tensor. The split depends on shape and dtype only, so all ranks with
    the same tensor split it in the same way. If the tensor is contiguous, each item's elements are contiguous, too.
    """
    data = item.tensor_data
    if data is None:
        yield (), item
        return
    shape, origin = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    if math.prod(shape) * data.properties.dtype.itemsize <= max_nbytes:
        yield (0,) * len(shape), item
        return
    for begin, sizes in _rectangles(shape, max(1, max_nbytes // data.properties.dtype.itemsize)):
        offset = torch.Size(map(sum, zip(origin, begin, strict=True)))
        chunk = TensorWriteData(ChunkStorageMetadata(offset, torch.Size(sizes)), data.properties, data.size)
        yield begin, WriteItem(MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=chunk)


def _rectangles(shape: Offset, numel: int) -> Iterator[tuple[Offset, Offset]]:
    """Divide ``shape`` into contiguous rectangles of at most ``numel`` elements. Yield the offset and sizes of each."""
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= numel)
    rows = numel // math.prod(shape[axis + 1 :])
    inner = (0,) * (len(shape) - axis - 1)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, start, *inner), (*(1,) * axis, min(rows, shape[axis] - start), *shape[axis + 1 :])
