"""Where a receiver puts a version: a double buffer, the receiver's own tensors, or a loader that takes tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from hwrl.comm import raw_bytes
from hwrl.interfaces import Backend
from hwrl.weights.buckets import BucketLease, BucketRing
from hwrl.weights.layout import NamedTensor, WeightLayout, view_bytes

RING_NBYTES = 1 << 30
"""The default limit for the memory of a receiver's ring."""


class Destination(Protocol):
    """Where a receiver puts the tensors of one layout, bucket by bucket.

    For each version the receiver calls ``begin``, then ``memory_for`` and ``unpack`` for each bucket, then ``finish``
    or ``cancel``. If a stored version fails and the one before replaces it, ``begin`` comes again with neither between.
    ``memory_for`` and ``unpack`` queue work on the current stream; ``unpack`` also blocks while a loader does.
    """

    slots: int | None
    """How many buckets a transport may queue ahead; None means any number."""

    tensors: Mapping[str, torch.Tensor]
    """The newest version's tensors, in the sender's order; empty if a loader takes them."""

    def begin(self) -> None:
        """Prepare for a version. From here on the version before is lost, unless there is memory for two."""

    def memory_for(self, index: int) -> BucketLease:
        """Return the memory to receive bucket ``index`` into. Buckets come in order."""

    def unpack(self, lease: BucketLease) -> None:
        """Copy a received bucket to its tensors, if it is not in their memory already."""

    def finish(self) -> None:
        """Complete the version. All its bytes have arrived and were verified."""

    def cancel(self) -> None:
        """Drop the version that was begun."""


DestinationFactory = Callable[[WeightLayout], Destination]
"""Makes the destination for a layout's versions. Raises LayoutMismatchError if a tensor has no destination."""


def ring_slots(bucket_nbytes: int, *, buckets: int, ring_nbytes: int = RING_NBYTES) -> int:
    """Return the number of slots in a receiver's ring: at most ``buckets``, within ``ring_nbytes``, at least one."""
    return max(1, min(buckets, ring_nbytes // max(bucket_nbytes, 1)))


def ring_nbytes_of(layout: WeightLayout, *, buckets: int = 8, ring_nbytes: int = RING_NBYTES) -> int:
    """Return the most bytes of the ring of a receiver with ``into`` or a loader. A double buffer has no ring."""
    largest = layout.largest_bucket_nbytes
    return largest * min(len(layout.buckets), ring_slots(largest, buckets=buckets, ring_nbytes=ring_nbytes))


class FlatVersion:
    """Memory for one version on ``device``, in the order of the layout, with its buckets and tensors as views."""

    def __init__(self, layout: WeightLayout, device: torch.device) -> None:
        flat = torch.empty(layout.nbytes, dtype=torch.uint8, device=device)
        self.buckets = [flat[bucket.offset : bucket.offset + bucket.nbytes] for bucket in layout.buckets]
        self.tensors: Mapping[str, torch.Tensor] = layout.views(flat)


class DoubleBuffer:
    """Memory for two versions. One is valid while the next is received into the other. Allocated at the first need."""

    slots: int | None = None

    def __init__(self, layout: WeightLayout, *, backend: Backend) -> None:
        self._layout, self._device = layout, backend.device()
        self._spare: FlatVersion | None = None
        self._newest: FlatVersion | None = None
        self.tensors: Mapping[str, torch.Tensor] = {}

    def begin(self) -> None:
        """Allocate the spare version, if it is not allocated yet."""
        self._spare = self._spare or FlatVersion(self._layout, self._device)

    def memory_for(self, index: int) -> BucketLease:
        """Return the bucket's memory in the spare version."""
        assert self._spare is not None, "begin was not called"
        return BucketLease(index, self._spare.buckets[index])

    def unpack(self, lease: BucketLease) -> None:
        """Do nothing: buckets are received in place."""

    def finish(self) -> None:
        """Make the spare version the newest."""
        assert self._spare is not None, "begin was not called"
        self.tensors = self._spare.tensors
        self._spare, self._newest = self._newest, self._spare

    def cancel(self) -> None:
        """Do nothing: the next version overwrites the spare memory."""


class TensorLoader(Protocol):
    """Takes a version tensor by tensor, as the weight loaders of engines do."""

    def begin(self) -> None:
        """Prepare for a version. A cancelled version may have left a mixture of two versions.

        It may come twice in a row: if a stored version fails, the one before it may be loaded instead.
        """

    def load(self, tensors: Sequence[NamedTensor]) -> None:
        """Take whole tensors, in the order of the buckets. The loader owns them; nothing overwrites them."""

    def finish(self) -> None:
        """Complete the version. All its tensors were loaded."""

    def cancel(self) -> None:
        """Drop the version that was begun. The next complete version must repair what this one leaves."""


class TensorStream:
    """Gives tensors to ``loader`` as they arrive, each in its own memory.

    It holds a ring of at most ``buckets`` buckets and ``ring_nbytes`` bytes, and the tensors of which only a part has
    arrived; the loader owns the others. A tensor with buckets of its own is received directly into its memory. The
    loader works on the stream that is current when this is made.
    """

    tensors: Mapping[str, torch.Tensor] = {}

    def __init__(
        self,
        layout: WeightLayout,
        loader: TensorLoader,
        *,
        backend: Backend,
        buckets: int = 8,
        ring_nbytes: int = RING_NBYTES,
    ) -> None:
        self._layout, self._loader, self._backend = layout, loader, backend
        self.slots: int | None = ring_slots(layout.largest_bucket_nbytes, buckets=buckets, ring_nbytes=ring_nbytes)
        self._ring = BucketRing(layout, backend=backend, buckets=self.slots)
        self._stream = backend.current_stream()
        self._parts: dict[int, torch.Tensor] = {}  # by the entry's number: tensors of which only a part has arrived
        self._names = _names_of(layout)

    def begin(self) -> None:
        """Begin the loader's version, and give it the tensors without bytes."""
        self._parts.clear()
        self._loader.begin()
        entries = enumerate(self._layout.entries)
        empty = [(entry.name, self._new(number)) for number, entry in entries if not entry.nbytes]
        if empty:
            self._loader.load(empty)

    def memory_for(self, index: int) -> BucketLease:
        """Return memory of the tensor if it is alone in the bucket, else a slot of the ring."""
        pieces = self._layout.buckets[index].pieces
        if len(pieces) > 1:
            return self._ring.lease(index)
        piece = pieces[0]
        raw = raw_bytes(self._part(piece.entry))
        return BucketLease(index, raw[piece.start : piece.start + piece.nbytes])

    def unpack(self, lease: BucketLease) -> None:
        """Give the loader the tensors that are complete with this bucket."""
        pieces = self._layout.buckets[lease.index].pieces
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

    def _part(self, number: int) -> torch.Tensor:
        if number not in self._parts:
            self._parts[number] = self._new(number)
        return self._parts[number]

    def _new(self, number: int) -> torch.Tensor:
        """Return memory for tensor ``number``. Writes on the current stream wait for earlier uses of that memory."""
        entry, current = self._layout.entries[number], self._backend.current_stream()
        with self._stream:
            raw = torch.empty(entry.nbytes, dtype=torch.uint8, device=self._backend.device())
        current.wait_stream(self._stream)
        return view_bytes(raw, entry)


def _names_of(layout: WeightLayout) -> dict[int, list[str]]:
    """Return all names of each tensor, by the number of its first entry: its own name and the names tied to it."""
    numbers = {entry.name: number for number, entry in enumerate(layout.entries)}
    names: dict[int, list[str]] = {}
    for entry in layout.entries:
        names.setdefault(numbers[entry.alias_of or entry.name], []).append(entry.name)
    return names
