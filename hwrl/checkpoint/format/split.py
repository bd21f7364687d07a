"""Large tensors are saved in pieces of a bounded size: :func:`split_item`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hwrl.checkpoint.format.shards import Offset

MAX_ITEM_NBYTES = 32 << 20
"""The most to read from the device, or into memory by a load, for one item of a plan."""


def split_item(item: WriteItem, *, max_nbytes: int = MAX_ITEM_NBYTES) -> Iterator[tuple[Offset, WriteItem]]:
    """Yield the pieces of ``item``, each of at most ``max_nbytes``, and the offset of each in the rank's tensor.

    The division depends on shape and dtype only, so all ranks with the same tensor divide it alike. A piece of a
    contiguous tensor is contiguous.
    """
    data = item.tensor_data
    if data is None:
        yield (), item
        return
    shape, whole = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    if math.prod(shape) * data.properties.dtype.itemsize <= max_nbytes:
        yield (0,) * len(shape), item
        return
    for begin, sizes in _rectangles(shape, max(1, max_nbytes // data.properties.dtype.itemsize)):
        offset = torch.Size(map(sum, zip(whole, begin, strict=True)))
        chunk = ChunkStorageMetadata(offset, torch.Size(sizes))
        piece = TensorWriteData(chunk, data.properties, data.size)
        yield begin, WriteItem(MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=piece)


def _rectangles(shape: Offset, numel: int) -> Iterator[tuple[Offset, Offset]]:
    """Yield offset and sizes of contiguous rectangles of at most ``numel`` elements. Together they cover ``shape``."""
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= numel)
    rows = numel // math.prod(shape[axis + 1 :])
    inner = (0,) * (len(shape) - axis - 1)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, start, *inner), (*(1,) * axis, min(rows, shape[axis] - start), *shape[axis + 1 :])
