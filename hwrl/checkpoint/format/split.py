"""Tensors in pieces of a bounded size: :func:`divide`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from hwrl.checkpoint.format.shards import Offset

PIECE_NBYTES = 32 << 20
"""The most that is read from the device, or into memory by a load, for one item of a plan."""


def divide(item: WriteItem) -> Iterator[tuple[Offset, WriteItem]]:
    """Yield items of at most ``PIECE_NBYTES`` that make up ``item``, and where each begins in its part of the tensor.

    How a tensor is divided depends on its shape and type only, so that all ranks that hold it divide it alike. Each
    piece of a contiguous part is contiguous.
    """
    data = item.tensor_data
    if data is None:
        yield (), item
        return
    shape, whole = tuple(data.chunk.sizes), tuple(data.chunk.offsets)
    if math.prod(shape) * data.properties.dtype.itemsize <= PIECE_NBYTES:
        yield (0,) * len(shape), item
        return
    for begin, sizes in _rectangles(shape, max(1, PIECE_NBYTES // data.properties.dtype.itemsize)):
        offset = torch.Size(map(sum, zip(whole, begin, strict=True)))
        chunk = ChunkStorageMetadata(offset, torch.Size(sizes))
        part = TensorWriteData(chunk, data.properties, data.size)
        yield begin, WriteItem(MetadataIndex(item.index.fqn, offset), WriteItemType.SHARD, tensor_data=part)


def _rectangles(shape: Offset, numel: int) -> Iterator[tuple[Offset, Offset]]:
    """Yield begin and sizes of contiguous rectangles of at most ``numel`` elements that cover ``shape``."""
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= numel)
    rows = numel // math.prod(shape[axis + 1 :])
    inner = (0,) * (len(shape) - axis - 1)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, start, *inner), (*(1,) * axis, min(rows, shape[axis] - start), *shape[axis + 1 :])
