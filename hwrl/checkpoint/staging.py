"""What one rank saves, and where it is read while training goes on: :class:`SaveItems`."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from hwrl.backend import Backend
from hwrl.checkpoint.layout import SafeSavePlanner
from hwrl.checkpoint.pieces import Part, Pieces, local_parts
from hwrl.errors import MemoryStateError
from hwrl.memory import HostCopy, Offloader, PinnedPool
from hwrl.memory.lending import part_of

_ALIGNMENT_NBYTES = 64


class Staging:
    """One slab of page-locked memory, and the tensors in it to which a state is copied; kept from save to save."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._pool = PinnedPool(backend)
        self._places: dict[Part, torch.Tensor] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of the slab."""
        return self._pool.nbytes

    @contextlib.contextmanager
    def copying(self, tensors: Mapping[Part, torch.Tensor]) -> Iterator[dict[Part, torch.Tensor]]:
        """Copy ``tensors`` on a side stream while the block runs; yields the copies, which are complete after it."""
        if not self._fits(tensors):
            self._lay_out(tensors)
        stream = self._backend.stream()
        stream.wait_stream(self._backend.current_stream())
        try:
            with stream:
                for part, tensor in tensors.items():
                    self._places[part].copy_(tensor, non_blocking=True)
            yield self._places
        finally:
            stream.synchronize()

    def close(self) -> None:
        """Free the slab."""
        self._places = {}
        self._pool.close()

    def _fits(self, tensors: Mapping[Part, torch.Tensor]) -> bool:
        return self._places.keys() == tensors.keys() and all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for place, tensor in ((self._places[part], tensor) for part, tensor in tensors.items())
        )

    def _lay_out(self, tensors: Mapping[Part, torch.Tensor]) -> None:
        self._places = {}  # before the slab: one that is too small is freed only when nothing lies in it
        slab = self._pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in tensors.values()))
        places, start = {}, 0
        for part, tensor in tensors.items():
            places[part] = part_of(slab, start, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"))
            start += _padded(tensor.nbytes)
        self._places = places


class SaveItems:
    """What there is to save of ``state``, and the plan for it.

    A tensor that ``offloader`` holds on the host is read there. It is lent until it is written, so that an offload
    waits for what is not written yet, and for no more. What is lent stands first in the plan.

    Timeline: ``hold``, with a staging if the state may change before it is written; then any threads plan and read;
    ``close`` gives back what is still lent.
    """

    def __init__(self, state: Mapping[str, Any], *, offloader: Offloader | None = None) -> None:
        self._planner = SafeSavePlanner()
        self._planner.set_up_planner(dict(state))
        self._offloader = offloader
        self._in_pieces = {name for name, value in self._planner.state_dict.items() if isinstance(value, Pieces)}
        self._here: dict[Part, torch.Tensor] = {}
        self._away: dict[Part, torch.Tensor] = {}
        for part, tensor in local_parts(self._planner.state_dict):
            (self._away if _is_away(tensor) else self._here)[part] = tensor
        self._lent: dict[Part, HostCopy] = {}
        self._values: dict[str, torch.Tensor | io.BytesIO] = {}
        self.staged_nbytes = 0

    @property
    def lent_nbytes(self) -> int:
        """The bytes that are read from the offloader's copies."""
        return sum(copy.nbytes for copy in self._lent.values())

    def hold(self, staging: Staging | None) -> None:
        """Borrow what is offloaded, make bytes of what is no tensor, and copy all else to ``staging``, if there is one.

        Nothing but shapes and dtypes is asked of the state after this.
        """
        if staging is None:
            self._hold_values()
            return
        with staging.copying(self._here) as copies:
            self._hold_values()
        self._here = copies
        self.staged_nbytes = sum(tensor.nbytes for tensor in copies.values())

    def _hold_values(self) -> None:
        for part, tensor in self._away.items():
            copy = None if self._offloader is None else self._offloader.lend(tensor)
            if copy is None:
                raise no_memory(part[0])
            self._lent[part] = copy
        for name, value in self._planner.state_dict.items():
            if not isinstance(value, torch.Tensor):
                item = WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
                self._values[name] = self._planner.resolve_data(item)

    def make_plan(self) -> SavePlan:
        """Return this rank's plan."""
        plan = self._planner.create_local_plan()
        return replace(plan, items=sorted(plan.items, key=lambda item: self._part(item) not in self._lent))

    @contextlib.contextmanager
    def reading(self, item: WriteItem) -> Iterator[torch.Tensor | io.BytesIO]:
        """Yield the tensor or the bytes of ``item``; what was lent is given back after the block."""
        if item.type is WriteItemType.BYTE_IO:
            yield self._values[item.index.fqn]
            return
        part = self._part(item)
        lent = self._lent.get(part)
        yield self._here[part] if lent is None else lent.tensor
        if lent is not None:
            lent.give_back()

    def close(self) -> None:
        """Give back what is still lent. May be called again."""
        for copy in self._lent.values():
            copy.give_back()

    def _part(self, item: WriteItem) -> Part:
        name, offset = item.index.fqn, item.index.offset
        return (name, tuple(offset)) if name in self._in_pieces and offset is not None else (name, None)


def require_memory(state: Mapping[str, Any]) -> None:
    """Raise MemoryStateError if a tensor of a flat state is offloaded."""
    for (name, _), tensor in local_parts(state):
        if _is_away(tensor):
            raise no_memory(name)


def no_memory(name: str) -> MemoryStateError:
    """Return the error about a tensor of the state that is offloaded."""
    return MemoryStateError(
        f"{name!r} has no memory",
        why="it is offloaded",
        fix="give save its `offloader=`, or save and resume inside `with offloader.loaded():`",
    )


def _is_away(tensor: torch.Tensor) -> bool:
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
