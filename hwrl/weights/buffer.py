"""The sender's ring of slabs, and the receiver's room for a whole model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from hwrl.backend import Backend
from hwrl.comm import Pending, raw_bytes
from hwrl.errors import WeightsError
from hwrl.weights.layout import Slab, WeightLayout, view_bytes


@dataclass
class _Slot:
    memory: torch.Tensor
    generation: int = 0
    in_use: Pending | None = None
    views: dict[int, list[torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lease:
    """``memory`` holds slab ``index``'s bytes until the ring comes round; ``copied`` says whether they were packed."""

    index: int
    memory: torch.Tensor
    copied: bool
    _slot: _Slot | None
    _generation: int

    def in_use_until(self, pending: Pending) -> None:
        """Keep the memory unchanged until ``pending`` is done: the next lease of this slot waits for it.

        The wait is the operation's own: on a device with streams it orders the packing after the operation and does
        not stop the host. Raises WeightsError if the slot has been leased again meanwhile: a broadcast of it would
        carry another slab's bytes.
        """
        if self._slot is None:
            return
        if self._slot.generation != self._generation:
            raise WeightsError(
                f"slab {self.index} is no longer in the broadcast buffer",
                why=f"its slot is at generation {self._slot.generation}, the lease at {self._generation}",
                fix="broadcast each lease before taking the next ones",
            )
        self._slot.in_use = pending


class BroadcastBuffer:
    """A ring of preallocated slabs on the device, into which tensors are packed for sending.

    A slab that is one contiguous tensor, or a part of one, is lent as it lies, without a copy. The others are packed
    by one batched copy. Memory is taken at the first need and reused; packing the same layout again allocates nothing,
    except a temporary for each tensor that is at once large and not contiguous.
    """

    def __init__(self, layout: WeightLayout, *, backend: Backend, slabs: int = 2) -> None:
        self._layout, self._backend = layout, backend
        self._slots: list[_Slot | None] = [None] * slabs
        self._slot_nbytes = max((slab.nbytes for slab in layout.slabs), default=0)

    def lease(self, index: int, tensors: Sequence[torch.Tensor]) -> Lease:
        """Return the bytes of slab ``index`` of ``tensors`` (all of the layout's, in its order)."""
        slab = self._layout.slabs[index]
        lying = self._as_it_lies(slab, tensors)
        if lying is not None:
            return Lease(index, lying, copied=False, _slot=None, _generation=0)
        slot = self._next_slot(index)
        self._pack(slot, index, tensors)
        return Lease(index, slot.memory[: slab.nbytes], copied=True, _slot=slot, _generation=slot.generation)

    def free_all(self) -> None:
        """Forget the operations that were under way: their group is closed, and waiting for them would only fail."""
        for slot in self._slots:
            if slot is not None:
                slot.in_use = None

    def _as_it_lies(self, slab: Slab, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        tensor = tensors[slab.pieces[0].entry]
        if len(slab.pieces) > 1 or not tensor.is_contiguous() or tensor.device != self._backend.device():
            return None
        raw = raw_bytes(tensor)
        if raw.storage_offset() % 8:  # the checksum reads 64-bit words
            return None
        return raw.narrow(0, slab.pieces[0].start, slab.nbytes)

    def _next_slot(self, index: int) -> _Slot:
        number = index % len(self._slots)
        slot = self._slots[number]
        if slot is None:
            memory = torch.empty(self._slot_nbytes, dtype=torch.uint8, device=self._backend.device())
            slot = self._slots[number] = _Slot(memory)
        if slot.in_use is not None:
            slot.in_use.wait()
            slot.in_use = None
        slot.generation += 1
        return slot

    def _pack(self, slot: _Slot, index: int, tensors: Sequence[torch.Tensor]) -> None:
        slab = self._layout.slabs[index]
        entries = self._layout.entries
        whole = all(piece.nbytes == entries[piece.entry].nbytes for piece in slab.pieces)
        if not whole:
            (piece,) = slab.pieces
            raw = raw_bytes(tensors[piece.entry].contiguous())
            slot.memory[: piece.nbytes].copy_(raw[piece.start : piece.start + piece.nbytes])
            return
        if index not in slot.views:
            slot.views[index] = [
                view_bytes(slot.memory[piece.at : piece.at + piece.nbytes], entries[piece.entry])
                for piece in slab.pieces
            ]
        torch._foreach_copy_(slot.views[index], [tensors[piece.entry] for piece in slab.pieces])


class Staging:
    """Room for one whole version in the layout's order: ``flat``, with its slabs and its tensors as views.

    ``flat`` is 1-d uint8, of at least the layout's size, at an aligned address.
    """

    def __init__(self, layout: WeightLayout, *, flat: torch.Tensor) -> None:
        self.slabs = [flat[slab.offset : slab.offset + slab.nbytes] for slab in layout.slabs]
        self.tensors: Mapping[str, torch.Tensor] = layout.views(flat)

    @classmethod
    def on(cls, device: torch.device, layout: WeightLayout) -> Staging:
        """Allocate room on ``device``."""
        return cls(layout, flat=torch.empty(layout.nbytes, dtype=torch.uint8, device=device))
