"""The ring of slabs on either side of the wire, and a receiver's places for a whole model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hwrl.comm import raw_bytes
from hwrl.errors import LayoutMismatchError, WeightsError
from hwrl.interfaces import Backend
from hwrl.memory.fingerprint import bytes_of
from hwrl.weights.layout import Entry, Piece, Slab, WeightLayout, view_bytes

# Tensors are copied as integers of their items' size: a batched copy of floats may not keep the bits of a NaN.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class Waitable(Protocol):
    """An operation under way: a :class:`~hwrl.comm.Pending`, or an event of the backend."""

    def wait(self) -> None:
        """Finish the operation, or order this thread's stream after it."""


@dataclass
class _Slot:
    memory: torch.Tensor
    generation: int = 0
    in_use: Waitable | None = None
    views: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True)
class Lease:
    """``memory`` is slab ``index``'s; if it is the ring's, until that comes round."""

    index: int
    memory: torch.Tensor
    _slot: _Slot | None = None
    _generation: int = 0

    @property
    def copied(self) -> bool:
        """Whether the memory is the ring's, so that tensors are copied into it or out of it."""
        return self._slot is not None

    def in_use_until(self, pending: Waitable) -> None:
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
    """A ring of preallocated slabs on the device, out of which tensors are sent and into which they are received.

    A slab whose tensors lie in memory as the layout lays them out (one contiguous tensor, or a part of one; several of
    a flat storage) is lent as it lies, without a copy. The others are packed and unpacked by one batched copy for each
    item size. Memory is taken at the first need and reused; using the same layout again allocates nothing, except a
    temporary for each tensor that is at once larger than a slab and not contiguous.
    """

    def __init__(self, layout: WeightLayout, *, backend: Backend, slabs: int = 2) -> None:
        self._layout, self._device = layout, backend.device()
        self._slots: list[_Slot | None] = [None] * slabs
        self._last = self._turn = -1
        self._slot_nbytes = 0
        self._groups_of: dict[int, list[tuple[torch.dtype, list[int]]]] = {}

    def pack(self, index: int, tensors: Sequence[torch.Tensor]) -> Lease:
        """Return the bytes of slab ``index``, to be sent. ``tensors`` are those of the slab's pieces."""
        lease = self._lease(index, tensors, gaps=True)
        if lease._slot is not None:
            for places, words in zip(self._views(lease._slot, index), self.words(index, tensors), strict=True):
                torch._foreach_copy_(places, words)
        return lease

    def room(self, index: int, tensors: Sequence[torch.Tensor]) -> Lease:
        """Return memory into which slab ``index`` can be received: that of ``tensors`` itself where it is possible."""
        return self._lease(index, tensors, gaps=False)

    def unpack(self, lease: Lease, words: Sequence[list[torch.Tensor]]) -> None:
        """Copy what was received into ``lease``, of :meth:`room`, to the tensors whose :meth:`words` these are."""
        if lease._slot is not None:
            for places, targets in zip(self._views(lease._slot, lease.index), words, strict=True):
                torch._foreach_copy_(targets, places)

    def words(self, index: int, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Return the pieces of slab ``index`` as views of ``tensors``, those of one item size together."""
        return [
            [_words(self._layout.slabs[index].pieces[number], tensors[number], word) for number in numbers]
            for word, numbers in self._groups(index)
        ]

    def release(self) -> None:
        """Free the slabs' memory, which no operation may use any more; the next lease allocates anew."""
        self._slots = [None] * len(self._slots)

    def free_all(self) -> None:
        """Forget the operations that were under way: their group is closed, and waiting for them would only fail."""
        for slot in self._slots:
            if slot is not None:
                slot.in_use = None

    def _lease(self, index: int, tensors: Sequence[torch.Tensor], *, gaps: bool) -> Lease:
        slab = self._layout.slabs[index]
        lying = self._as_it_lies(slab, tensors, gaps=gaps)
        if lying is not None:
            return Lease(index, lying)
        slot = self._next_slot(index)
        return Lease(index, slot.memory[: slab.nbytes], slot, slot.generation)

    def _as_it_lies(self, slab: Slab, tensors: Sequence[torch.Tensor], *, gaps: bool) -> torch.Tensor | None:
        """Return the slab as memory of ``tensors``; ``gaps`` says whether bytes between them may belong to others."""
        first = slab.pieces[0]
        begin = tensors[0].storage_offset() * tensors[0].itemsize - first.at + first.start
        if begin % 8 or not tensors[0].is_contiguous() or tensors[0].device != self._device:
            return None  # the checksum reads 64-bit words
        if len(tensors) > 1 and not self._are_neighbours(slab, tensors, gaps=gaps):
            return None
        storage = tensors[0].untyped_storage()
        if begin < 0 or begin + slab.nbytes > storage.nbytes():
            return None
        memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=self._device)
        return memory.set_(storage, begin, (slab.nbytes,), (1,))

    def _are_neighbours(self, slab: Slab, tensors: Sequence[torch.Tensor], *, gaps: bool) -> bool:
        base = tensors[0].data_ptr() - slab.pieces[0].at + slab.pieces[0].start
        for piece, tensor in zip(slab.pieces, tensors, strict=True):
            if tensor.data_ptr() + piece.start != base + piece.at or not tensor.is_contiguous():
                return False
        pairs = itertools.pairwise(slab.pieces)
        if not gaps and any(before.at + before.nbytes != after.at for before, after in pairs):
            return False
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1

    def _next_slot(self, index: int) -> _Slot:
        # Each transfer begins with the same slot, so that a slab meets the views that were made for it.
        self._turn = 0 if index <= self._last else (self._turn + 1) % len(self._slots)
        self._last, number = index, self._turn
        slot = self._slots[number]
        if slot is None:
            self._slot_nbytes = self._slot_nbytes or max(slab.nbytes for slab in self._layout.slabs)
            memory = torch.empty(self._slot_nbytes, dtype=torch.uint8, device=self._device)
            slot = self._slots[number] = _Slot(memory)
        if slot.in_use is not None:
            slot.in_use.wait()
            slot.in_use = None
        slot.generation += 1
        return slot

    def _groups(self, index: int) -> list[tuple[torch.dtype, list[int]]]:
        """Return which pieces of slab ``index`` are copied together, and as what."""
        if index not in self._groups_of:
            groups: dict[torch.dtype, list[int]] = {}
            for number, piece in enumerate(self._layout.slabs[index].pieces):
                size = self._layout.entries[piece.entry].dtype.itemsize if piece.whole else 1
                groups.setdefault(_WORDS[size], []).append(number)
            self._groups_of[index] = list(groups.items())
        return self._groups_of[index]

    def _views(self, slot: _Slot, index: int) -> list[list[torch.Tensor]]:
        """Return the places in ``slot`` of slab ``index``'s pieces, in groups as :meth:`words` returns them."""
        if index not in slot.views:
            pieces, entries = self._layout.slabs[index].pieces, self._layout.entries
            raw = [slot.memory[piece.at : piece.at + piece.nbytes] for piece in pieces]
            shaped = [
                view_bytes(one, entries[piece.entry]) if piece.whole else one
                for one, piece in zip(raw, pieces, strict=True)
            ]
            slot.views[index] = [
                [shaped[number].view(word) for number in numbers] for word, numbers in self._groups(index)
            ]
        return slot.views[index]


def _words(piece: Piece, tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    if piece.whole:
        return tensor.view(word)
    return raw_bytes(tensor.contiguous())[piece.start : piece.start + piece.nbytes]


class Place(Protocol):
    """Where a receiver puts a version, slab by slab."""

    tensors: Mapping[str, torch.Tensor]
    """The version's tensors, in the sender's order; whole when every slab has landed and ``finish`` was called."""

    def room(self, index: int) -> Lease:
        """Return the memory to receive slab ``index`` into."""

    def land(self, lease: Lease) -> None:
        """Bring what was received to where it belongs; ordered on the current stream."""

    def finish(self) -> None:
        """Complete the version after its last slab."""


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

    def room(self, index: int) -> Lease:
        """Return slab ``index``'s part of the room."""
        return Lease(index, self.slabs[index])

    def land(self, lease: Lease) -> None:
        """Return: slabs are received where they belong."""

    def finish(self) -> None:
        """Return: tied tensors are the same views."""


class InPlace:
    """The receiver's own tensors, ``targets``: the version replaces their content, with a ring's memory at most.

    Raises LayoutMismatchError if a tensor of the layout is missing, or has another dtype, shape or device.
    """

    def __init__(
        self, layout: WeightLayout, targets: Mapping[str, torch.Tensor], *, backend: Backend, slabs: int
    ) -> None:
        for entry in layout.entries:
            _check_target(entry, targets.get(entry.name), backend.device(), layout.slab_nbytes)
        self.tensors: Mapping[str, torch.Tensor] = {e.name: targets[e.name].detach() for e in layout.entries}
        self._layout, self._buffer = layout, BroadcastBuffer(layout, backend=backend, slabs=slabs)
        aliases = [(self.tensors[e.name], self.tensors[e.alias_of]) for e in layout.entries if e.alias_of is not None]
        self._copies = [(alias, whole) for alias, whole in aliases if alias.data_ptr() != whole.data_ptr()]
        self._words: dict[int, list[list[torch.Tensor]]] = {}
        self._own: dict[int, Lease] = {}  # the slabs that are the tensors' own memory, as far as they are known
        flat = _flat_memory(layout, self.tensors)
        if flat is not None:
            staging = Staging(layout, flat=flat)
            self._own = {index: staging.room(index) for index in range(len(layout.slabs))}

    def room(self, index: int) -> Lease:
        """Return the tensors' own memory where slab ``index`` can be received into it, else a slot of the ring."""
        if index in self._own:
            return self._own[index]
        lease = self._buffer.room(index, self._of(index))
        if not lease.copied:
            self._own[index] = lease
        return lease

    def land(self, lease: Lease) -> None:
        """Copy what came into the ring to the tensors."""
        if not lease.copied:
            return
        if lease.index not in self._words:
            self._words[lease.index] = self._buffer.words(lease.index, self._of(lease.index))
        self._buffer.unpack(lease, self._words[lease.index])

    def finish(self) -> None:
        """Copy tied tensors to targets that are not tied here."""
        for alias, whole in self._copies:
            alias.copy_(whole)

    def _of(self, index: int) -> list[torch.Tensor]:
        return [self.tensors[self._layout.entries[number].name] for number in self._layout.slabs[index].entries]


def _check_target(entry: Entry, target: torch.Tensor | None, device: torch.device, slab_nbytes: int) -> None:
    if target is None:
        why = "the receiver has no tensor of this name"
    elif target.dtype != entry.dtype or target.shape != entry.shape:
        sent = f"{entry.dtype} {list(entry.shape)}"
        why = f"the sender has it as {sent}, the receiver as {target.dtype} {list(target.shape)}"
    elif target.device != device:
        why = f"the receiver has it on {target.device}, and receives on {device}"
    elif entry.nbytes > slab_nbytes and not target.is_contiguous():
        why = f"it is larger than a slab of {slab_nbytes:,} bytes and not contiguous"
    else:
        return
    raise LayoutMismatchError(
        f"tensor {entry.name!r} cannot be received in place",
        why=why,
        fix="give WeightReceiver(into=…) tensors like the sender's, or receive without it and load what you get",
    )


def _flat_memory(layout: WeightLayout, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the storage of ``tensors`` if they are ``layout.views`` of a storage of their own."""
    own = [(entry, tensors[entry.name]) for entry in layout.entries if entry.nbytes]
    if not own:
        return None
    storage = own[0][1].untyped_storage()
    base = storage.data_ptr()
    if storage.nbytes() != layout.nbytes or base % 8:
        return None
    if not all(tensor.data_ptr() == base + entry.offset and tensor.is_contiguous() for entry, tensor in own):
        return None
    return bytes_of(storage)
