"""What one rank saves, and where it is read while training goes on: :class:`SaveItems`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from hwrl.backend import Backend
from hwrl.checkpoint.layout import SafeSavePlanner
from hwrl.checkpoint.pieces import Offset, Pieces
from hwrl.errors import MemoryStateError
from hwrl.memory import HostCopy, Offloader, PinnedPool
from hwrl.memory.lending import part_of

_ALIGNMENT_NBYTES = 64

_Part = tuple[str, Offset | None]  # a tensor's name, and which of its pieces it is, if it is in pieces


class SaveItems(SafeSavePlanner):
    """Plans the saving of ``state`` and hands its tensors and values to torch's writer.

    A tensor that ``offloader`` holds on the host is read there. It is lent until the writer asks for the next item, so
    that an offload waits for what is not written yet, and for no more. What is lent stands first in the plan.

    Timeline: ``staging`` around ``make_plan`` if the state may change before it is written; then any thread writes;
    ``close`` gives back what is still lent.
    """

    def __init__(self, state: Mapping[str, Any], *, offloader: Offloader | None = None) -> None:
        super().__init__()
        self.set_up_planner(dict(state))
        self._offloader = offloader
        self._in_pieces = {name for name, value in self.state_dict.items() if isinstance(value, Pieces)}
        tensors = dict(parts_of(self.state_dict))
        found = {part: local_in_memory(tensor) for part, tensor in tensors.items()}
        self._here = {part: local for part, local in found.items() if local is not None}
        self._away = {part: tensors[part] for part, local in found.items() if local is None}
        self._lent: dict[_Part, HostCopy] = {}
        self._values: dict[str, Any] = {}
        self._reading: HostCopy | None = None
        self.staged_nbytes = 0

    @property
    def lent_nbytes(self) -> int:
        """The bytes that are read from the offloader's copies."""
        return sum(copy.tensor.nbytes for copy in self._lent.values())

    @contextlib.contextmanager
    def staging(self, pool: PinnedPool, backend: Backend) -> Iterator[None]:
        """Copy what is not lent into one slab of pinned memory, on a side stream, while the block runs.

        The state may be changed after the block. The next save reuses the slab.
        """
        slab = pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in self._here.values()))
        stream = backend.stream()
        stream.wait_stream(backend.current_stream())
        staged, start = {}, 0
        with stream:
            for part, tensor in self._here.items():
                place = slab[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                place.copy_(tensor, non_blocking=True)
                staged[part] = part_of(slab, start, place)
                start += _padded(tensor.nbytes)
        try:
            yield
        finally:
            stream.synchronize()
        self._here = staged
        self.staged_nbytes = sum(tensor.nbytes for tensor in staged.values())

    def make_plan(self) -> SavePlan:
        """Return this rank's plan; what is no tensor is made bytes now, and what is offloaded is lent from now on."""
        for part, tensor in self._away.items():
            copy = None if self._offloader is None else self._offloader.lend(tensor)
            if copy is None:
                raise no_memory(part[0])
            self._lent[part] = copy
        plan = self.create_local_plan()
        for item in plan.items:
            if item.type is WriteItemType.BYTE_IO:
                self._values[item.index.fqn] = super().resolve_data(item)
        return replace(plan, items=sorted(plan.items, key=lambda item: self._part(item) not in self._lent))

    def resolve_data(self, write_item: WriteItem) -> Any:
        """Return the tensor or the bytes of ``write_item``. The item that was asked for before counts as written."""
        self._end_reading()
        if write_item.type is WriteItemType.BYTE_IO:
            return self._values[write_item.index.fqn]
        part = self._part(write_item)
        self._reading = self._lent.get(part)
        return self._here[part] if self._reading is None else self._reading.tensor

    def close(self) -> None:
        """Give back what is still lent. May be called again."""
        self._end_reading()
        for copy in self._lent.values():
            copy.give_back()

    def _part(self, item: WriteItem) -> _Part:
        name, offset = item.index.fqn, item.index.offset
        return (name, tuple(offset)) if name in self._in_pieces and offset is not None else (name, None)

    def _end_reading(self) -> None:
        if self._reading is not None:
            self._reading.give_back()
            self._reading = None


def parts_of(state: Mapping[str, Any]) -> Iterator[tuple[_Part, torch.Tensor]]:
    """Yield what this rank has of each tensor of a flat state: the tensor, or each of its :class:`Pieces`."""
    for name, value in state.items():
        if isinstance(value, Pieces):
            yield from (((name, offset), piece) for offset, piece in value.pieces.items())
        elif isinstance(value, torch.Tensor):
            yield (name, None), value


def local_in_memory(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of ``tensor``, detached; None if it is offloaded."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    return None if local.numel() and local.untyped_storage().nbytes() == 0 else local


def no_memory(name: str) -> MemoryStateError:
    """Return the error about a tensor of the state that is offloaded."""
    return MemoryStateError(
        f"{name!r} has no memory",
        why="it is offloaded",
        fix="give save its `offloader=`, or save and resume inside `with offloader.loaded():`",
    )


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
