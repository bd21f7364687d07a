"""Copies a state to the host, so that it can be written while training goes on changing it."""

from __future__ import annotations

import io
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from hwrl.backend import Backend
from hwrl.memory import PinnedPool

_ALIGNMENT_NBYTES = 64


class StagedItems(DefaultSavePlanner):
    """The items of a save plan, copied into one slab of pinned memory that the next save reuses.

    Stands in for the planner wherever torch's writer asks for data.
    """

    def __init__(self, planner: DefaultSavePlanner, plan: SavePlan, *, pool: PinnedPool, backend: Backend) -> None:
        """Return when the copies are complete; the state may be changed then."""
        super().__init__()
        self._items = {item.index: planner.resolve_data(item) for item in plan.items}
        tensors = {index: data for index, data in self._items.items() if isinstance(data, torch.Tensor)}
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._copy(tensors, pool, backend)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the host tensor or the bytes of ``write_item``."""
        data = self._items[write_item.index]
        if isinstance(data, io.BytesIO):
            data.seek(0)
        return data

    def _copy(self, tensors: dict[MetadataIndex, torch.Tensor], pool: PinnedPool, backend: Backend) -> None:
        slab = pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in tensors.values()))
        start = 0
        for index, tensor in tensors.items():
            place = slab[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._items[index] = place.copy_(tensor.detach(), non_blocking=True)
            start += _padded(tensor.nbytes)
        backend.synchronize()


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
