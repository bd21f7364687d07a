"""Where a receiver puts a version: room for two versions, the receiver's own tensors, or a loader of tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hwrl.comm import raw_bytes
from hwrl.interfaces import Backend
from hwrl.weights.layout import NamedTensor, WeightLayout, view_bytes
from hwrl.weights.slabs import SlabLease, SlabRing

RING_NBYTES = 1 << 30
"""The most memory of a receiver's ring, by default."""


class Destination(Protocol):
    """Where a receiver puts the tensors of one layout, slab by slab. A version is ``begin``, its slabs, ``finish``.

    ``memory_for`` and ``store`` only queue work on the current stream.
    """

    slots: int | None
    """How many slabs may be under way at once; None: any number."""

    tensors: Mapping[str, torch.Tensor]
    """The newest version's tensors, in the sender's order; empty if the destination gives them to a loader."""

    def begin(self) -> None:
        """Prepare for a version; from here on the version before is lost, unless there is room for two."""

    def memory_for(self, index: int) -> SlabLease:
        """Return the memory to receive slab ``index`` into. Call it in the order of the slabs."""

    def unpack(self, lease: SlabLease) -> None:
        """Bring a received slab to its tensors, if it is not there yet."""

    def finish(self) -> None:
        """Complete the version. All of it has come, and is what was sent."""

    def cancel(self) -> None:
        """Drop the version that was begun and is not complete."""

    def release(self) -> None:
        """Free the ring, if there is one. All slabs are stored; the next one allocates the ring again."""

    def further(self, layout: WeightLayout, make_destination: DestinationFactory) -> Destination:
        """Return the destination of further tensors of the version that was begun: those of ``layout``.

        ``make_destination`` made this one. Raises LayoutMismatchError if there is no place for a tensor.
        """


DestinationFactory = Callable[[WeightLayout], Destination]
"""Makes the destination of a layout's versions; LayoutMismatchError if it has no place for one of the tensors."""


def ring_slots(slab_nbytes: int, *, slabs: int, ring_nbytes: int = RING_NBYTES) -> int:
    """Return how many slots a receiver's ring has: at most ``slabs``, in ``ring_nbytes``, and at least one."""
    return max(1, min(slabs, ring_nbytes // max(slab_nbytes, 1)))


def ring_nbytes_of(layout: WeightLayout, *, slabs: int = 8, ring_nbytes: int = RING_NBYTES) -> int:
    """Return the most bytes that a receiver allocates for ``layout`` beside the place of the tensors."""
    largest = max((slab.nbytes for slab in layout.slabs), default=0)
    return largest * min(len(layout.slabs), ring_slots(largest, slabs=slabs, ring_nbytes=ring_nbytes))


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


class DoubleBuffer:
    """Room for two versions in turn: one serves while the next arrives. Each is allocated when it is first needed."""

    slots: int | None = None

    def __init__(self, layout: WeightLayout, *, backend: Backend) -> None:
        self._layout, self._device = layout, backend.device()
        self._spare: FlatVersion | None = None
        self._newest: FlatVersion | None = None
        self.tensors: Mapping[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Take the spare version's memory."""
        self._spare = self._spare or FlatVersion.on(self._device, self._layout)

    def memory_for(self, index: int) -> SlabLease:
        """Return the slab's part of the spare version."""
        assert self._spare is not None, "begin comes first"
        return SlabLease(index, self._spare.slabs[index])

    def unpack(self, lease: SlabLease) -> None:
        """Do nothing: slabs are received in place."""

    def finish(self) -> None:
        """Let the spare version be the newest."""
        assert self._spare is not None, "begin comes first"
        self.tensors = self._spare.tensors
        self._spare, self._newest = self._newest, self._spare

    def cancel(self) -> None:
        """Do nothing: the next version overwrites it."""

    def release(self) -> None:
        """Do nothing: there is no ring."""

    def further(self, layout: WeightLayout, make_destination: DestinationFactory) -> Destination:
        """Return another room for two versions."""
        return make_destination(layout)


class ChapteredDestination:
    """The destinations of one version: ``first`` for chapter 0, and one for each further chapter.

    ``make_destination`` is the receiver's.
    """

    def __init__(self, layout: WeightLayout, first: Destination, make_destination: DestinationFactory) -> None:
        self._layout, self._make_destination = layout, make_destination
        self._destinations = [first]
        self.nbytes = layout.payload_nbytes
        """The bytes of the tensors of all chapters so far."""
        self.tensors: Mapping[str, torch.Tensor] = {}
        """The newest version's tensors, in the sender's order; empty if a loader has them."""

    def begin(self) -> Destination:
        """Prepare for a version; return the destination of its chapter 0."""
        del self._destinations[1:]
        self.nbytes = self._layout.payload_nbytes
        self._destinations[0].begin()
        return self._destinations[0]

    def begin_chapter(self, layout: WeightLayout) -> Destination:
        """Return the destination of another chapter. Raises LayoutMismatchError if there is no place for a tensor."""
        self._destinations[-1].release()  # there is one ring at a time
        newest = self._destinations[0].further(layout, self._make_destination)
        self._destinations.append(newest)
        newest.begin()
        self.nbytes += layout.payload_nbytes
        return newest

    def finish(self) -> None:
        """Complete the version."""
        for destination in reversed(self._destinations):  # the first one last: it completes the version of a loader
            destination.finish()
        self.tensors = {name: tensor for one in self._destinations for name, tensor in one.tensors.items()}

    def cancel(self) -> None:
        """Drop the version that was begun."""
        for destination in reversed(self._destinations):
            destination.cancel()


class TensorLoader(Protocol):
    """Takes a version tensor by tensor, as an engine's own loaders do."""

    def begin(self) -> None:
        """Prepare for a version. A version that was begun and cancelled may have left a mixture."""

    def load(self, tensors: Sequence[NamedTensor]) -> None:
        """Take whole tensors, in the sender's order of slabs. They are the loader's to keep, and never overwritten."""

    def finish(self) -> None:
        """Complete the version: all tensors were given."""

    def cancel(self) -> None:
        """Drop the version that was begun. The next whole version must be able to repair what it leaves."""


class TensorStream:
    """Gives tensors to ``loader`` as they arrive, each in memory of its own.

    Holds a ring of at most ``slots`` slabs, the tensors that have come in part, and what the loader keeps. A tensor
    with slabs of its own is received straight into the tensor that the loader gets. The loader works on the stream
    that is current when this is made.
    """

    tensors: Mapping[str, torch.Tensor] = {}

    def __init__(self, layout: WeightLayout, loader: TensorLoader, *, backend: Backend, slots: int) -> None:
        self._layout, self._loader, self._backend = layout, loader, backend
        self.slots: int | None = slots
        self._ring = SlabRing(layout, backend=backend, slabs=slots)
        self._stream = backend.current_stream()
        self._parts: dict[int, torch.Tensor] = {}  # by the entry's number: not whole yet
        self._names = _names_of(layout)

    def begin(self) -> None:
        """Begin the loader's version, and give it the tensors without a byte."""
        self._parts.clear()
        self._loader.begin()
        entries = enumerate(self._layout.entries)
        empty = [(entry.name, self._new(number)) for number, entry in entries if not entry.nbytes]
        if empty:
            self._loader.load(empty)

    def further(self, layout: WeightLayout, make_destination: DestinationFactory) -> TensorStream:
        """Return a stream of further tensors to the loader, which begins and ends its version only once."""
        assert self.slots is not None
        return TensorStream(layout, _Further(self._loader), backend=self._backend, slots=self.slots)

    def memory_for(self, index: int) -> SlabLease:
        """Return memory of the only tensor in the slab, or a slot of the ring."""
        pieces = self._layout.slabs[index].pieces
        if len(pieces) > 1:
            return self._ring.lease(index)
        piece = pieces[0]
        raw = raw_bytes(self._part(piece.entry))
        return SlabLease(index, raw[piece.start : piece.start + piece.nbytes])

    def unpack(self, lease: SlabLease) -> None:
        """Give the loader the tensors that are whole with this slab."""
        pieces = self._layout.slabs[lease.index].pieces
        if lease.copied:
            for piece in pieces:
                to = raw_bytes(self._part(piece.entry))[piece.start : piece.start + piece.nbytes]
                to.copy_(lease.memory[piece.at : piece.at + piece.nbytes])
        whole = [
            piece.entry for piece in pieces if piece.start + piece.nbytes == self._layout.entries[piece.entry].nbytes
        ]
        tensors = [(number, self._parts.pop(number)) for number in whole]
        if tensors:
            self._stream.wait_stream(self._backend.current_stream())
            with self._stream:
                self._loader.load([(name, tensor) for number, tensor in tensors for name in self._names[number]])

    def finish(self) -> None:
        """Complete the loader's version."""
        self._loader.finish()

    def cancel(self) -> None:
        """Drop the loader's version."""
        self._parts.clear()
        self._loader.cancel()

    def release(self) -> None:
        """Free the ring. All slabs are stored; the next one allocates it again."""
        self._ring.release()

    def _part(self, number: int) -> torch.Tensor:
        if number not in self._parts:
            self._parts[number] = self._new(number)
        return self._parts[number]

    def _new(self, number: int) -> torch.Tensor:
        """Return memory for tensor ``number``; writes on the current stream wait for what used the memory before."""
        entry, current = self._layout.entries[number], self._backend.current_stream()
        with self._stream:
            raw = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._backend.device())
        current.wait_stream(self._stream)
        return view_bytes(raw, entry)


class _Further:
    """A loader of further tensors, for a version that another destination begins and ends."""

    def __init__(self, loader: TensorLoader) -> None:
        self.load = loader.load

    def begin(self) -> None: ...

    def finish(self) -> None: ...

    def cancel(self) -> None: ...


def _names_of(layout: WeightLayout) -> dict[int, list[str]]:
    """Return the names of each tensor, by the number of its first entry: its own, and those of tensors tied to it."""
    numbers = {entry.name: number for number, entry in enumerate(layout.entries)}
    names: dict[int, list[str]] = {}
    for entry in layout.entries:
        names.setdefault(numbers[entry.alias_of or entry.name], []).append(entry.name)
    return names
