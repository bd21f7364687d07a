"""Receives into tensors that differ from the sent ones, by copy rules: whole tensors, rows, columns, fused tensors.

Not a ``dist.scatter``: this receiver gets all bytes, and copies the elements that it needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hwrl.errors import LayoutMismatchError
from hwrl.interfaces import Backend
from hwrl.weights.buckets import INTEGERS, BucketLease, BucketRing
from hwrl.weights.destination import RING_NBYTES, ring_slots
from hwrl.weights.layout import Bucket, Entry, WeightLayout


@dataclass(frozen=True)
class CopyRule:
    """Copies elements of the sent tensor ``name`` to ``target``.

    The elements are a view of the contiguous sent tensor. The view has the shape of ``target`` and the strides
    ``stride``, and begins at element ``offset``. ``target`` may have other strides and another dtype.
    """

    name: str
    target: torch.Tensor
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def whole(cls, name: str, target: torch.Tensor) -> CopyRule:
        """Return the rule that copies all of ``name`` to ``target``."""
        return cls(name, target, torch.empty(target.shape, device="meta").stride())


class _CopyBlock(NamedTuple):
    """A block of elements: (size, sent stride, target stride) of each dimension, and the first elements of both."""

    dims: tuple[tuple[int, int, int], ...]
    sent: int
    target: int


class _Copy(NamedTuple):
    """The copy of a block to ``target``, a view of a rule's target. Its elements begin at byte ``at`` of the bucket."""

    target: torch.Tensor
    at: int
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _BucketCopies:
    """The copies of one bucket, in groups for batched calls."""

    groups: list[list[_Copy]]
    direct: torch.Tensor | None
    """The targets' memory, if the bucket can be received directly into it."""

    def __post_init__(self) -> None:
        self.targets = [[copy.target for copy in group] for group in self.groups]


class CopyDestination:
    """A destination of the receiver's own tensors. Each rule copies its elements to its target.

    A bucket is received directly into its targets if they are in memory as in the bucket. Otherwise it is received into
    a ring of at most ``buckets`` buckets and ``ring_nbytes`` bytes, and copied from there in batches: copies between
    contiguous memory in one batch, copies of slices in another. This is planned once, when the destination is made.
    ``constants`` are pairs of a tensor and the value of all its elements, filled in for each version. Raises
    LayoutMismatchError if a rule does not fit its tensor.
    """

    def __init__(
        self,
        layout: WeightLayout,
        rules: Iterable[CopyRule],
        *,
        backend: Backend,
        buckets: int = 8,
        ring_nbytes: int = RING_NBYTES,
        constants: Sequence[tuple[torch.Tensor, float]] = (),
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.tensors: Mapping[str, torch.Tensor] = tensors or {}
        self._constants, self._device = constants, backend.device()
        by_entry = _rules_by_entry(layout, rules, backend.device())
        self._copies = [self._plan(layout, bucket, by_entry) for bucket in layout.buckets]
        self.slots: int | None = ring_slots(layout.largest_bucket_nbytes, buckets=buckets, ring_nbytes=ring_nbytes)
        self._ring = BucketRing(layout, backend=backend, buckets=self.slots)

    @classmethod
    def into(
        cls,
        layout: WeightLayout,
        targets: Mapping[str, torch.Tensor],
        *,
        backend: Backend,
        buckets: int = 8,
        ring_nbytes: int = RING_NBYTES,
    ) -> CopyDestination:
        """Return a destination of whole tensors, ``targets``, with the names, shapes and dtypes of the sent ones."""
        for entry in layout.entries:
            _check_target(entry, targets.get(entry.name))
        tensors = {entry.name: targets[entry.name].detach() for entry in layout.entries}
        return cls(
            layout,
            whole_rules(layout, tensors),
            backend=backend,
            buckets=buckets,
            ring_nbytes=ring_nbytes,
            tensors=tensors,
        )

    def begin(self) -> None:
        """Do nothing: buckets overwrite the targets as they arrive."""

    def memory_for(self, index: int) -> BucketLease:
        """Return the memory of the targets, or a slot of the ring."""
        direct = self._copies[index].direct
        return self._ring.lease(index) if direct is None else BucketLease(index, direct)

    def unpack(self, lease: BucketLease) -> None:
        """Copy a bucket from the ring to its targets."""
        if not lease.copied:
            return
        copies = self._copies[lease.index]
        sources = lease.views(lambda memory: _sources(copies, memory))
        for targets, elements in zip(copies.targets, sources, strict=True):
            torch._foreach_copy_(targets, elements)

    def finish(self) -> None:
        """Fill in the constants."""
        with torch.no_grad():
            for target, value in self._constants:
                target.fill_(value)

    def cancel(self) -> None:
        """Do nothing: the next version overwrites all targets."""

    def release(self) -> None:
        """Free the ring. No bucket may be under way; the next bucket allocates the ring again."""
        self._ring.release()

    def _plan(self, layout: WeightLayout, bucket: Bucket, rules: Mapping[int, Sequence[CopyRule]]) -> _BucketCopies:
        copies: list[_Copy] = []
        for piece in bucket.pieces:
            dtype = layout.entries[piece.entry].dtype
            begin, end = piece.start // dtype.itemsize, (piece.start + piece.nbytes) // dtype.itemsize
            shift = piece.at // dtype.itemsize - begin
            for rule in rules.get(piece.entry, ()):
                for block in _blocks_of(rule, begin, end):
                    copies.append(_copy_of(block, rule.target, dtype, shift))
        direct = _direct_memory(layout, bucket, copies, self._device)
        return _BucketCopies([] if direct is not None else _grouped(copies), direct)


def _rules_by_entry(layout: WeightLayout, rules: Iterable[CopyRule], device: torch.device) -> dict[int, list[CopyRule]]:
    """Return the rules, by the number of the entry whose bytes they copy."""
    numbers = {entry.name: number for number, entry in enumerate(layout.entries)}
    found: dict[int, list[CopyRule]] = {}
    for rule in rules:
        if rule.name not in numbers:
            raise _cannot_receive(rule.name, "the sender has no tensor of this name")
        entry = layout.entries[numbers[rule.name]]
        ends = [(size - 1) * stride for size, stride in zip(rule.target.shape, rule.stride, strict=True)]
        last = rule.offset + sum(ends)
        if rule.target.numel() and not 0 <= rule.offset <= last < entry.nbytes // entry.dtype.itemsize:
            sent = f"{entry.dtype} {list(entry.shape)}"
            raise _cannot_receive(rule.name, f"the sender has it as {sent}, and a rule copies element {last}")
        if rule.target.device != device:
            raise _cannot_receive(rule.name, f"its target is on {rule.target.device}, and the receiver is on {device}")
        found.setdefault(numbers[entry.alias_of or entry.name], []).append(rule)
    return found


def whole_rules(layout: WeightLayout, targets: Mapping[str, torch.Tensor]) -> list[CopyRule]:
    """Return the rules that copy whole tensors to ``targets``; one rule for tensors that are tied on both sides."""
    return [
        CopyRule.whole(entry.name, targets[entry.name])
        for entry in layout.entries
        if entry.alias_of is None or targets[entry.name].data_ptr() != targets[entry.alias_of].data_ptr()
    ]


# -- blocks of elements ---------------------------------------------------------------------------------------------


def _blocks_of(rule: CopyRule, begin: int, end: int) -> Iterator[_CopyBlock]:
    """Yield the rule's elements among elements ``begin`` to ``end`` of the sent tensor, in few blocks."""
    dims = zip(rule.target.shape, rule.stride, rule.target.stride(), strict=True)
    sized = sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1], reverse=True)
    if rule.target.numel():
        yield from _cut(_merged(sized), rule.offset, int(rule.target.storage_offset()), begin, end)


def _merged(dims: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions after merging neighbours that are contiguous on both sides."""
    merged: list[tuple[int, int, int]] = []
    for size, sent, target in dims:
        if merged and merged[-1][1:] == (size * sent, size * target):
            merged[-1] = (merged[-1][0] * size, sent, target)
        else:
            merged.append((size, sent, target))
    return tuple(merged)


def _cut(dims: tuple[tuple[int, int, int], ...], sent: int, target: int, begin: int, end: int) -> Iterator[_CopyBlock]:
    """Yield the part of a block between two elements of the sent tensor. The sent strides in ``dims`` must fall."""
    last = sent + sum((size - 1) * stride for size, stride, _ in dims)
    if last < begin or sent >= end:
        return
    if sent >= begin and last < end:
        yield _CopyBlock(dims, sent, target)
        return
    (size, stride, target_stride), inner = dims[0], dims[1:]
    span = last - sent - (size - 1) * stride  # from the first to the last element of one index
    if stride == 0:
        first, full, rest, stop = 0, 0, 0, size
    else:
        first = max(0, -((sent + span - begin) // stride))
        stop = min(size, -((sent - end) // stride))
        full = min(max(first, -((sent - begin) // stride)), stop)
        rest = max(full, min(stop, (end - 1 - span - sent) // stride + 1))
    for index in range(first, full):
        yield from _cut(inner, sent + index * stride, target + index * target_stride, begin, end)
    if rest > full:
        block = ((rest - full, stride, target_stride), *inner)
        yield _CopyBlock(block, sent + full * stride, target + full * target_stride)
    for index in range(rest, stop):
        yield from _cut(inner, sent + index * stride, target + index * target_stride, begin, end)


def _copy_of(block: _CopyBlock, target: torch.Tensor, dtype: torch.dtype, shift: int) -> _Copy:
    """Return the copy of ``block``; ``shift`` is the bucket's element number minus the tensor's."""
    shape, stride = [dim[0] for dim in block.dims], tuple(dim[1] for dim in block.dims)
    view = target.detach().as_strided(shape, [dim[2] for dim in block.dims], block.target)
    if target.dtype == dtype:  # copy as integers, because a batched copy of small floats may change the bits of a NaN
        dtype = INTEGERS[dtype.itemsize]
        view = view.view(dtype)
    return _Copy(view, (block.sent + shift) * dtype.itemsize, stride, dtype)


def _is_plain(copy: _Copy) -> bool:
    """Return whether the copy is between contiguous memory of one dtype."""
    dense = copy.stride in ((), (1,)) and copy.target.is_contiguous()
    return dense and copy.target.dtype == copy.dtype


def _grouped(copies: Sequence[_Copy]) -> list[list[_Copy]]:
    """Return the copies in groups for batched calls. A slice among contiguous copies would make the call slow."""
    groups: dict[tuple[bool, torch.dtype, torch.dtype], list[_Copy]] = {}
    for copy in copies:
        groups.setdefault((_is_plain(copy), copy.dtype, copy.target.dtype), []).append(copy)
    return list(groups.values())


def _sources(copies: _BucketCopies, memory: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return the elements of each group as views of a slot's ``memory``."""
    return [
        [
            memory.view(copy.dtype).as_strided(copy.target.shape, copy.stride, copy.at // copy.dtype.itemsize)
            for copy in group
        ]
        for group in copies.groups
    ]


def _direct_memory(
    layout: WeightLayout, bucket: Bucket, copies: Sequence[_Copy], device: torch.device
) -> torch.Tensor | None:
    """Return the bucket as memory of its targets; None if that differs from it or has bytes of other tensors."""
    if not copies or not all(map(_is_plain, copies)):
        return None
    ordered = sorted(copies, key=lambda copy: copy.at)
    storage = ordered[0].target.untyped_storage()
    begin = _first_byte(ordered[0].target) - ordered[0].at
    ends = [0, *(copy.at + copy.target.nbytes for copy in ordered)]
    if ends[-1] != bucket.nbytes or ordered[0].at or begin < 0 or (storage.data_ptr() + begin) % 8:
        return None  # the checksum reads 64-bit words
    for copy in ordered:
        same = copy.target.untyped_storage().data_ptr() == storage.data_ptr()
        if not same or _first_byte(copy.target) - copy.at != begin:
            return None
    owns_gaps = storage.nbytes() == layout.nbytes and begin == bucket.offset
    gaps = [copy.at - end for copy, end in zip(ordered, ends, strict=False)]
    if min(gaps) < 0 or (max(gaps) > 0 and not (owns_gaps and len(copies) == len(bucket.pieces))):
        return None
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, begin, (bucket.nbytes,), (1,))


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


# -- errors ---------------------------------------------------------------------------------------------------------


def _check_target(entry: Entry, target: torch.Tensor | None) -> None:
    if target is None:
        raise _cannot_receive(entry.name, "the receiver has no tensor of this name")
    if target.dtype != entry.dtype or target.shape != entry.shape:
        sent = f"{entry.dtype} {list(entry.shape)}"
        raise _cannot_receive(
            entry.name, f"the sender has it as {sent}, the receiver as {target.dtype} {list(target.shape)}"
        )


def _cannot_receive(name: str, why: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"tensor {name!r} cannot be received in place",
        why=why,
        fix="give the receiver tensors like the sender's, or receive without `into` and load the result",
    )
