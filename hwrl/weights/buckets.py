"""The work on buckets: read the tensors of each bucket, pack them into a ring, and compute checksums.

Both ends use the ring: a sender packs into it, and a receiver receives into it.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from hwrl.comm import raw_bytes
from hwrl.errors import LayoutMismatchError, WeightsError
from hwrl.interfaces import Backend
from hwrl.weights.layout import Bucket, Entry, NamedTensor, Piece, WeightLayout, checked_pair, memory_key, view_bytes
from hwrl.weights.messages import Vote, VoteKind
from hwrl.weights.shares import Shares
from hwrl.weights.source import WeightSource, drain

# Tensors are copied as integers of their item size. A batched copy of small floats goes through a wider type, which may
# change the bits of a NaN. torch has no integer of 16 bytes, but it copies complex128 without a conversion.
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


# -- read -----------------------------------------------------------------------------------------------------------


class TensorReader:
    """Reads ``source`` once, in the layout's order and only as far as needed, and checks each tensor.

    With several senders it expects only the tensors of ``share``. It takes a microsecond for each tensor, because
    mixtures of experts have tens of thousands.
    """

    def __init__(
        self, layout: WeightLayout, source: WeightSource, *, shares: Shares | None = None, share: int = 0
    ) -> None:
        self.layout, self._source = layout, source
        self._numbers = range(len(layout.entries)) if shares is None else shares.entries_of(share)
        self._others = frozenset[str]() if shares is None else shares.names_beside(share)
        self._iteration: Iterator[NamedTensor] | None = None  # while None, nothing was read, and close() reads nothing
        self.source_holds = source.holds_tensors
        """Whether the caller keeps all tensors alive until the transfer ends."""
        self._tensors: list[torch.Tensor | None] = [None] * len(layout.entries)
        self._next = 0  # index into _numbers
        self._divided: int | None = None  # the tensor that the next bucket continues
        # Keeps the tensors and not their addresses, because a freed tensor's address can be used again.
        self._tied_to: dict[str, torch.Tensor | None] = {
            entry.alias_of: None for entry in layout.entries if entry.alias_of is not None
        }

    def tensors_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """Return the tensors of the pieces of ``bucket``. Call it once for each bucket, in order.

        Holds a tensor until its last bucket was returned or, with several senders, until a bucket without it is
        requested. Raises LayoutMismatchError, with the first difference, if the tensors are not the planned ones.
        """
        if self._divided is not None and self._divided not in bucket.entries:
            self._tensors[self._divided] = None  # another sender has its last bucket
        if self._next < len(self._numbers) and self._numbers[self._next] <= bucket.entries[-1]:
            self._read(bucket.entries[-1] + 1)
        tensors = [self._tensors[index] for index in bucket.entries]
        last = bucket.pieces[-1]
        continues = last.start + last.nbytes < self.layout.entries[last.entry].nbytes
        self._divided = last.entry if continues else None
        for index in bucket.entries[:-1] if continues else bucket.entries:
            self._tensors[index] = None
        return tensors  # type: ignore[return-value]  # all were just read

    @property
    def begun(self) -> bool:
        """Whether reading has begun."""
        return self._iteration is not None

    def begin(self) -> None:
        """Begin reading, so that :meth:`close` reads the source to its end."""
        self._iterator()

    def read_ahead(self) -> None:
        """Read and check all tensors now if the source holds them, so that errors come before anything is sent."""
        if self.source_holds:
            self.finish()

    def finish(self) -> None:
        """Read the tensors after the last bucket: tied or empty ones. Raises LayoutMismatchError if more follow."""
        self._read(len(self.layout.entries))
        if next(self._iterator(), None) is not None:
            raise _changed(f"{len(self._numbers)} tensors were planned and more came")

    def close(self) -> None:
        """Drop the tensors. If reading has begun, read the source to its end."""
        self._tensors = []
        self._tied_to = {}
        iteration, self._iteration = self._iteration, None
        if iteration is not None:
            drain(iteration)

    def _iterator(self) -> Iterator[NamedTensor]:
        if self._iteration is None:
            weights, others = iter(self._source), self._others
            self._iteration = (pair for pair in weights if pair[0] not in others) if others else weights
        return self._iteration

    def _read(self, stop: int) -> None:
        entries = self.layout.entries
        end = bisect.bisect_left(self._numbers, stop, self._next)
        for number, pair in zip(self._numbers[self._next : end], self._iterator(), strict=False):
            entry, (name, tensor) = entries[number], checked_pair(pair)
            if tensor.dtype is not entry.dtype or tensor.shape != entry.shape or name != entry.name:
                raise _changed(_difference(entry, name, tensor))
            self._tensors[number] = tensor
            self._next += 1
            first = None if entry.alias_of is None else self._tied_to[entry.alias_of]
            if first is not None and memory_key(tensor) != memory_key(first):
                raise _changed(f"tensor {name!r} was tied to {entry.alias_of!r} and no longer is")
            if self._tied_to and name in self._tied_to:
                self._tied_to[name] = tensor
        if self._next < end:
            raise _changed(f"{len(self._numbers)} tensors were planned and {self._next} came")


def _difference(entry: Entry, name: str, tensor: torch.Tensor) -> str:
    if name != entry.name:
        return f"tensor {entry.name!r} was planned here and {name!r} came"
    planned = f"{entry.dtype} {list(entry.shape)}"
    return f"tensor {name!r} was planned as {planned} and came as {tensor.dtype} {list(tensor.shape)}"


def _changed(why: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        "the tensors are not those of the agreed layout",
        why=why,
        fix="publish the same tensors in the same order, or make a new WeightSender for the new ones",
    )


# -- pack and unpack ------------------------------------------------------------------------------------------------


class Waitable(Protocol):
    """An operation under way: a :class:`~hwrl.comm.Pending` or an event of the backend."""

    def wait(self) -> None:
        """Order this thread's current stream after the operation; without streams, block until it is done."""


@dataclass
class _RingSlot:
    memory: torch.Tensor
    generation: int = 0
    in_use: Waitable | None = None
    views: dict[int, list[list[torch.Tensor]]] = field(default_factory=dict)


@dataclass(frozen=True)
class BucketLease:
    """The bytes of bucket ``index`` (1-d uint8): memory of the tensors themselves, or a ring slot.

    A slot belongs to the lease until the ring leases it again.
    """

    index: int
    memory: torch.Tensor
    _slot: _RingSlot | None = None
    _generation: int = 0

    @property
    def copied(self) -> bool:
        """Whether ``memory`` is a ring slot, so that tensors are copied into it or out of it."""
        return self._slot is not None

    def views(self, make: Callable[[torch.Tensor], list[list[torch.Tensor]]]) -> list[list[torch.Tensor]]:
        """Return views of this bucket's ring slot. ``make`` makes them from the slot's memory at the first call."""
        assert self._slot is not None, "memory of the tensors themselves needs no views"
        if self.index not in self._slot.views:
            self._slot.views[self.index] = make(self._slot.memory)
        return self._slot.views[self.index]

    def in_use_until(self, pending: Waitable) -> None:
        """Keep the memory unchanged until ``pending`` is done: the next lease of this slot waits for it.

        On a device with streams the wait orders the stream and does not block the host. Raises WeightsError if the slot
        was leased again meanwhile, because ``pending`` would then read or write another bucket's bytes.
        """
        if self._slot is None:
            return
        if self._slot.generation != self._generation:
            raise WeightsError(
                f"bucket {self.index} is no longer in the ring",
                why=f"its slot is at generation {self._slot.generation}, the lease at {self._generation}",
                fix="use each lease before taking the next ones",
            )
        self._slot.in_use = pending


class BucketRing:
    """A ring of ``buckets`` slots on the device, for buckets to be sent or received.

    A bucket is sent in place, without a slot, if its tensors are in memory as in the layout: one contiguous tensor, a
    part of one, or several tensors of a flat storage. Other buckets are packed into a slot by one batched copy for each
    item size. Memory is allocated when it is first needed, and reused. Later nothing is allocated, except a temporary
    for a tensor that is larger than a bucket and not contiguous, or a view that conjugates or negates.
    """

    def __init__(self, layout: WeightLayout, *, backend: Backend, buckets: int = 2) -> None:
        self.layout, self._device = layout, backend.device()
        self._slots: list[_RingSlot | None] = [None] * buckets
        self._last_bucket = self._last_slot = -1
        self._groups_of: dict[int, list[tuple[torch.dtype, list[int]]]] = {}

    def pack(self, index: int, tensors: Sequence[torch.Tensor]) -> BucketLease:
        """Return the bytes of bucket ``index``, ready to be sent. ``tensors`` are the tensors of its pieces."""
        in_place = self._in_place(self.layout.buckets[index], tensors)
        if in_place is not None:
            return BucketLease(index, in_place)
        lease = self.lease(index)
        *targets, gaps = lease.views(lambda memory: self._views(memory, index))
        if gaps:  # what was there before would be sent, and change the checksums
            torch._foreach_zero_(gaps)
        for to, (dtype, numbers) in zip(targets, self._groups(index), strict=True):
            pieces = self.layout.buckets[index].pieces
            torch._foreach_copy_(to, [_piece_as(dtype, pieces[number], tensors[number]) for number in numbers])
        return lease

    def lease(self, index: int) -> BucketLease:
        """Return a ring slot for bucket ``index``, after the operation that uses it.

        With streams this orders the current stream; without, it blocks until the operation is done.
        """
        # Each transfer begins with the same slot, so that each bucket finds the views that were made for it.
        self._last_slot = 0 if index <= self._last_bucket else (self._last_slot + 1) % len(self._slots)
        self._last_bucket, number = index, self._last_slot
        slot = self._slots[number]
        if slot is None:
            nbytes = self.layout.largest_bucket_nbytes
            nbytes += -nbytes % max(INTEGERS)  # so that it can be viewed as any dtype
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            slot = self._slots[number] = _RingSlot(memory)
        in_use, slot.in_use = slot.in_use, None  # another thread may forget it meanwhile, to abort the transfer
        if in_use is not None:
            in_use.wait()
        slot.generation += 1
        return BucketLease(index, slot.memory[: self.layout.buckets[index].nbytes], slot, slot.generation)

    def release(self) -> None:
        """Free the ring's memory, which no operation may be using. The next lease allocates it again."""
        self._slots = [None] * len(self._slots)

    def forget_pending(self) -> None:
        """Forget the operations under way. Their group was closed, so waiting for them would only fail."""
        for slot in self._slots:
            if slot is not None:
                slot.in_use = None

    def _in_place(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the bucket as memory of ``tensors``, or None if they are not in memory as in the bucket.

        Bytes between the tensors may belong to other tensors.
        """
        first = bucket.pieces[0]
        begin = tensors[0].storage_offset() * tensors[0].itemsize - first.at + first.start
        if begin % 8 or not _is_as_in_memory(tensors[0]) or tensors[0].device != self._device:
            return None  # the checksum reads 64-bit words
        if len(tensors) > 1 and not self._are_adjacent(bucket, tensors):
            return None
        storage = tensors[0].untyped_storage()
        if begin < 0 or begin + bucket.nbytes > storage.nbytes():
            return None
        memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=self._device)
        return memory.set_(storage, begin, (bucket.nbytes,), (1,))

    def _are_adjacent(self, bucket: Bucket, tensors: Sequence[torch.Tensor]) -> bool:
        base = tensors[0].data_ptr() - bucket.pieces[0].at + bucket.pieces[0].start
        for piece, tensor in zip(bucket.pieces, tensors, strict=True):
            if tensor.data_ptr() + piece.start != base + piece.at or not _is_as_in_memory(tensor):
                return False
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1

    def _groups(self, index: int) -> list[tuple[torch.dtype, list[int]]]:
        """Return the pieces of bucket ``index`` in groups for batched copies, each with the integer type to copy as."""
        if index not in self._groups_of:
            groups: dict[torch.dtype, list[int]] = {}
            for number, piece in enumerate(self.layout.buckets[index].pieces):
                size = self.layout.entries[piece.entry].dtype.itemsize if piece.whole else 1
                groups.setdefault(INTEGERS[size], []).append(number)
            self._groups_of[index] = list(groups.items())
        return self._groups_of[index]

    def _views(self, memory: torch.Tensor, index: int) -> list[list[torch.Tensor]]:
        """Return the pieces of bucket ``index`` as views of a slot's ``memory``, one list for each item size.

        The last list has the gaps between the pieces.
        """
        pieces, entries = self.layout.buckets[index].pieces, self.layout.entries
        raw = [memory[piece.at : piece.at + piece.nbytes] for piece in pieces]
        shaped = [
            view_bytes(one, entries[piece.entry]) if piece.whole else one
            for one, piece in zip(raw, pieces, strict=True)
        ]
        grouped = [[shaped[number].view(dtype) for number in numbers] for dtype, numbers in self._groups(index)]
        ends = ((one.at + one.nbytes, after.at) for one, after in itertools.pairwise(pieces))
        return [*grouped, [memory[end:begin] for end, begin in ends if end < begin]]


def _is_as_in_memory(tensor: torch.Tensor) -> bool:
    """Return whether the elements of ``tensor`` are the bytes of its memory, in order."""
    return tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _piece_as(dtype: torch.dtype, piece: Piece, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if piece.whole:
        return tensor.view(dtype)
    return raw_bytes(tensor.contiguous())[piece.start : piece.start + piece.nbytes]


# -- checksums ------------------------------------------------------------------------------------------------------

_ROW_WORDS = 4096
_ROW_NBYTES = 8 * _ROW_WORDS  # 32 KiB: long enough to sum at the memory's speed, short enough to locate damage
_ODD = 0x1E3779B97F4A7C15  # any large odd number, because multiplying by it loses no bit modulo 2**64


class Checksums:
    """A 64-bit checksum for each 32 KiB row of each bucket, computed on the device: ``values``, a 1-d int64 tensor.

    They detect every change within one 64-bit word, and rows that changed places. They do not detect words that
    changed places within a row. Summing a bucket is usually one kernel and allocates nothing.
    """

    def __init__(self, layout: WeightLayout, *, device: torch.device) -> None:
        rows = [-(-bucket.nbytes // _ROW_NBYTES) for bucket in layout.buckets]
        self.layout, self.buckets = layout, len(rows)
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._begins = list(itertools.accumulate(rows, initial=0))
        self.values = torch.zeros(self._begins[-1], dtype=torch.int64, device=device)

    @staticmethod
    def nbytes(layout: WeightLayout) -> int:
        """Return the size of ``values`` for ``layout``."""
        return 8 * sum(-(-bucket.nbytes // _ROW_NBYTES) for bucket in layout.buckets)

    def add(self, index: int, raw: torch.Tensor) -> None:
        """Compute the checksums of bucket ``index`` from its bytes (1-d uint8, 8-byte aligned). Does not block."""
        full_rows = raw.numel() // _ROW_NBYTES
        if index not in self._views:
            mine = self.values[self._begins[index] : self._begins[index + 1]]
            self._views[index] = mine[:full_rows], mine[full_rows:]
        of_rows, of_rest = self._views[index]
        if full_rows:
            rows = raw[: full_rows * _ROW_NBYTES] if of_rest.numel() else raw
            torch.sum(rows.view(torch.int64).view(full_rows, _ROW_WORDS), 1, out=of_rows)
        if of_rest.numel():
            rest = raw[full_rows * _ROW_NBYTES :]
            words = rest[: rest.numel() // 8 * 8].view(torch.int64)
            torch.sum(words.view(1, -1), 1, out=of_rest)
            if rest.numel() % 8:
                word = torch.zeros(8, dtype=torch.uint8, device=rest.device)
                word[: rest.numel() % 8] = rest[words.numel() * 8 :]
                of_rest += word.view(torch.int64) * _ODD

    def compare(self, theirs: torch.Tensor) -> Vote:
        """Compare with the sender's checksums: WHOLE, or CORRUPT with the first damaged buckets. Blocks."""
        if torch.equal(self.values, theirs):
            return Vote(VoteKind.WHOLE)
        rows: list[int] = (self.values != theirs).nonzero().view(-1).tolist()
        wrong = sorted({bisect.bisect_right(self._begins, row) - 1 for row in rows})
        return Vote(VoteKind.CORRUPT, f"buckets {wrong[:8]} of {self.buckets}")


class ChangedSums:
    """Counts the checksums that differ between one version and the next, on the device."""

    def __init__(self) -> None:
        self._before: tuple[WeightLayout, torch.Tensor] | None = None

    def count(self, layout: WeightLayout, values: torch.Tensor) -> int | None:
        """Return how many of ``values`` differ from those of the last call, and keep a copy of them.

        None if the last call was about another layout, or this is the first. Blocks until the device has computed them.
        """
        before, self._before = self._before, (layout, values.clone())
        if before is None or before[0] is not layout:
            return None
        return int((before[1] != values).sum())
