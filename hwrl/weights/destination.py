"""Where a receiver puts a version: a copy in the layout's order, or the receiver's own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from hwrl.errors import LayoutMismatchError
from hwrl.interfaces import Backend
from hwrl.memory.fingerprint import bytes_of
from hwrl.weights.layout import Entry, WeightLayout
from hwrl.weights.slabs import Checksums, SlabLease, SlabRing


class Destination(Protocol):
    """Where a receiver puts one version, slab by slab."""

    tensors: Mapping[str, torch.Tensor]
    """The version's tensors, in the sender's order; whole after the last slab was stored and ``finish`` returned."""

    def memory_for(self, index: int) -> SlabLease:
        """Return the memory to receive slab ``index`` into."""

    def store(self, lease: SlabLease) -> None:
        """Copy a received slab to its tensors if it is not there yet; queued on the current stream."""

    def finish(self) -> None:
        """Complete the version after its last slab."""


class FlatVersion:
    """Memory for one version in the layout's order: ``flat``, with its slabs and tensors as views.

    ``flat`` is 1-d uint8, at least as large as the layout, at an aligned address.
    """

    def __init__(self, layout: WeightLayout, *, flat: torch.Tensor) -> None:
        self.slabs = [flat[slab.offset : slab.offset + slab.nbytes] for slab in layout.slabs]
        self.tensors: Mapping[str, torch.Tensor] = layout.views(flat)

    @classmethod
    def on(cls, device: torch.device, layout: WeightLayout) -> FlatVersion:
        """Allocate the memory on ``device``."""
        return cls(layout, flat=torch.empty(layout.nbytes, dtype=torch.uint8, device=device))

    def memory_for(self, index: int) -> SlabLease:
        """Return slab ``index``'s part of the memory."""
        return SlabLease(index, self.slabs[index])

    def store(self, lease: SlabLease) -> None:
        """Do nothing: slabs are received in place."""

    def finish(self) -> None:
        """Do nothing: tied tensors are the same views."""


class InPlace:
    """The receiver's own tensors, ``targets``: each version replaces their content. Needs at most a ring of slabs.

    Raises LayoutMismatchError if a tensor of the layout is missing, or has another dtype, shape or device.
    """

    def __init__(
        self, layout: WeightLayout, targets: Mapping[str, torch.Tensor], *, backend: Backend, slabs: int
    ) -> None:
        for entry in layout.entries:
            _check_target(entry, targets.get(entry.name), backend.device(), layout.slab_nbytes)
        self.tensors: Mapping[str, torch.Tensor] = {e.name: targets[e.name].detach() for e in layout.entries}
        self._layout, self._buffer = layout, SlabRing(layout, backend=backend, slabs=slabs)
        aliases = [(self.tensors[e.name], self.tensors[e.alias_of]) for e in layout.entries if e.alias_of is not None]
        self._untied = [(alias, first) for alias, first in aliases if alias.data_ptr() != first.data_ptr()]
        self._integers: dict[int, list[list[torch.Tensor]]] = {}
        self._direct: dict[int, SlabLease] = {}  # slabs known to be received straight into the tensors
        flat = _flat_memory(layout, self.tensors)
        if flat is not None:
            version = FlatVersion(layout, flat=flat)
            self._direct = {index: version.memory_for(index) for index in range(len(layout.slabs))}

    def memory_for(self, index: int) -> SlabLease:
        """Return the tensors' own memory if slab ``index`` can be received into it, else a slot of the ring."""
        if index in self._direct:
            return self._direct[index]
        lease = self._buffer.memory_for(index, self._tensors_of(index))
        if not lease.copied:
            self._direct[index] = lease
        return lease

    def store(self, lease: SlabLease) -> None:
        """Copy a slab from the ring to its tensors."""
        if not lease.copied:
            return
        if lease.index not in self._integers:
            self._integers[lease.index] = self._buffer.as_integers(lease.index, self._tensors_of(lease.index))
        self._buffer.unpack(lease, self._integers[lease.index])

    def finish(self) -> None:
        """Copy tied tensors to targets that are not tied here."""
        for alias, first in self._untied:
            alias.copy_(first)

    def _tensors_of(self, index: int) -> list[torch.Tensor]:
        return [self.tensors[self._layout.entries[number].name] for number in self._layout.slabs[index].entries]


class DoubleBuffer:
    """Two destinations in turn: one serves while the next version arrives in the other.

    With ``into`` both are those tensors. ``sums`` are the receiver's checksums of the version that arrives.
    """

    def __init__(
        self, layout: WeightLayout, *, backend: Backend, into: Mapping[str, torch.Tensor] | None, slabs: int
    ) -> None:
        self.layout, self._device = layout, backend.device()
        self.sums = Checksums(layout, device=self._device)
        in_place = None if into is None else InPlace(layout, into, backend=backend, slabs=slabs)
        self._pair: list[Destination | None] = [in_place, in_place]

    def spare(self) -> Destination:
        """Return the destination for the next version; allocates it at the first need."""
        destination = self._pair[0] or FlatVersion.on(self._device, self.layout)
        self._pair[0] = destination
        return destination

    def flip(self) -> Mapping[str, torch.Tensor]:
        """Let the version that just arrived serve; return its tensors."""
        destination = self.spare()
        destination.finish()
        self._pair.reverse()
        return destination.tensors


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
    """Return the storage of ``tensors`` if they are exactly ``layout.views`` of it, else None."""
    stored = [(entry, tensors[entry.name]) for entry in layout.entries if entry.nbytes]
    if not stored:
        return None
    storage = stored[0][1].untyped_storage()
    base = storage.data_ptr()
    if storage.nbytes() != layout.nbytes or base % 8:
        return None
    if not all(tensor.data_ptr() == base + entry.offset and tensor.is_contiguous() for entry, tensor in stored):
        return None
    return bytes_of(storage)
