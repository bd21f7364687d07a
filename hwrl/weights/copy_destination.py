"""Receive into tensors that hold parts of the sent ones: whole tensors, rows, columns, several in one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from hwrl.errors import LayoutMismatchError
from hwrl.interfaces import Backend
from hwrl.weights.destination import RING_NBYTES, Destination, DestinationFactory, ring_slots
from hwrl.weights.layout import Entry, Slab, WeightLayout
from hwrl.weights.slabs import INTEGERS, SlabLease, SlabRing


@dataclass(frozen=True)
class CopyRule:
    """Elements of the sent tensor ``name`` for ``target``.

    They are a view of the contiguous sent tensor: the shape of ``target``, ``stride`` in elements, beginning at element
    ``offset``. ``target`` may have any strides, and may have another dtype.
    """

    name: str
    target: torch.Tensor
    stride: tuple[int, ...]
    offset: int = 0

    @classmethod
    def whole(cls, name: str, target: torch.Tensor) -> CopyRule:
        """Return the rule of a target for all of ``name``."""
        return cls(name, target, torch.empty(target.shape, device="meta").stride())


class _CopyBlock(NamedTuple):
    """A block of elements: its (size, sent stride, target stride) by dimension, and both first elements."""

    dims: tuple[tuple[int, int, int], ...]
    sent: int
    target: int


class _Copy(NamedTuple):
    """A block for ``target``, a view of the wanted tensor, from byte ``at`` of a slab. ``dtype`` is the sent one."""

    target: torch.Tensor
    at: int
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class _SlabCopies:
    """The copies of one slab, in groups for batched calls: targets, and where each one's elements are in the slab."""

    groups: list[list[_Copy]]
    direct: torch.Tensor | None
    """The targets' memory, if the slab can be received there."""

    def __post_init__(self) -> None:
        self.targets = [[copy.target for copy in group] for group in self.groups]


class CopyDestination:
    """The receiver's own tensors as the place of each version: every rule's elements go to its target.

    A slab is received straight into the targets where they lie in memory as the slab does. Otherwise it is received
    into a slot of a ring of at most ``slabs`` slabs and ``ring_nbytes`` bytes, and copied from there in batches: those
    between contiguous memory in one, those of slices in another. All of it is planned here, once. ``constants`` are
    tensors with the value of all their elements; they are filled in each version. Raises LayoutMismatchError if a rule
    does not fit its tensor.
    """

    def __init__(
        self,
        layout: WeightLayout,
        rules: Iterable[CopyRule],
        *,
        backend: Backend,
        slabs: int = 8,
        ring_nbytes: int = RING_NBYTES,
        constants: Sequence[tuple[torch.Tensor, float]] = (),
        tensors: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.tensors: Mapping[str, torch.Tensor] = tensors or {}
        self._constants, self._device = constants, backend.device()
        by_entry = _by_entry(layout, rules, backend.device())
        self._copies = [self._plan(layout, slab, by_entry) for slab in layout.slabs]
        largest = max((slab.nbytes for slab in layout.slabs), default=0)
        self.slots: int | None = ring_slots(largest, slabs=slabs, ring_nbytes=ring_nbytes)
        self._ring = SlabRing(layout, backend=backend, slabs=self.slots)

    @classmethod
    def into(
        cls,
        layout: WeightLayout,
        targets: Mapping[str, torch.Tensor],
        *,
        backend: Backend,
        slabs: int = 8,
        ring_nbytes: int = RING_NBYTES,
    ) -> CopyDestination:
        """Return the place of whole tensors in ``targets``, of the sent names, shapes and dtypes."""
        for entry in layout.entries:
            _check_target(entry, targets.get(entry.name), backend.device())
        tensors = {entry.name: targets[entry.name].detach() for entry in layout.entries}
        return cls(
            layout, whole_rules(layout, tensors), backend=backend, slabs=slabs, ring_nbytes=ring_nbytes, tensors=tensors
        )

    def begin(self) -> None:
        """Do nothing: slabs overwrite the targets as they come."""

    def memory_for(self, index: int) -> SlabLease:
        """Return the targets' memory, or a slot of the ring."""
        direct = self._copies[index].direct
        return self._ring.lease(index) if direct is None else SlabLease(index, direct)

    def unpack(self, lease: SlabLease) -> None:
        """Copy a slab from the ring to its targets."""
        if not lease.copied:
            return
        copies = self._copies[lease.index]
        sources = lease.views(lambda memory: _sources(copies, memory))
        for targets, elements in zip(copies.targets, sources, strict=True):
            torch._foreach_copy_(targets, elements)

    def finish(self) -> None:
        """Fill the constants."""
        with torch.no_grad():
            for target, value in self._constants:
                target.fill_(value)

    def cancel(self) -> None:
        """Do nothing: the next version overwrites all of it."""

    def release(self) -> None:
        """Free the ring. All slabs are stored; the next one allocates it again."""
        self._ring.release()

    def further(self, layout: WeightLayout, make_destination: DestinationFactory) -> Destination:
        """Return the destination of ``layout``, as the receiver makes it."""
        return make_destination(layout)

    def _plan(self, layout: WeightLayout, slab: Slab, rules: Mapping[int, Sequence[CopyRule]]) -> _SlabCopies:
        copies: list[_Copy] = []
        for piece in slab.pieces:
            dtype = layout.entries[piece.entry].dtype
            begin, end = piece.start // dtype.itemsize, (piece.start + piece.nbytes) // dtype.itemsize
            shift = piece.at // dtype.itemsize - begin
            for rule in rules.get(piece.entry, ()):
                for box in _boxes_of(rule, begin, end):
                    copies.append(_copy_of(box, rule.target, dtype, shift))
        direct = _direct_memory(layout, slab, copies, self._device)
        return _SlabCopies([] if direct is not None else _grouped(copies), direct)


def _by_entry(layout: WeightLayout, rules: Iterable[CopyRule], device: torch.device) -> dict[int, list[CopyRule]]:
    """Return the rules by the number of the entry that has their bytes."""
    numbers = {entry.name: number for number, entry in enumerate(layout.entries)}
    found: dict[int, list[CopyRule]] = {}
    for rule in rules:
        if rule.name not in numbers:
            raise _no_place(rule.name, "the sender has no tensor of this name")
        entry = layout.entries[numbers[rule.name]]
        ends = [(size - 1) * stride for size, stride in zip(rule.target.shape, rule.stride, strict=True)]
        last = rule.offset + sum(ends)
        if rule.target.numel() and not 0 <= rule.offset <= last < entry.nbytes // entry.dtype.itemsize:
            sent = f"{entry.dtype} {list(entry.shape)}"
            raise _no_place(rule.name, f"the sender has it as {sent}, and element {last} is wanted")
        if rule.target.device != device:
            raise _no_place(rule.name, f"its target is on {rule.target.device}, and it is received on {device}")
        found.setdefault(numbers[entry.alias_of or entry.name], []).append(rule)
    return found


def whole_rules(layout: WeightLayout, targets: Mapping[str, torch.Tensor]) -> list[CopyRule]:
    """Return the rules for whole tensors in ``targets``; of tensors tied on both sides the first has one."""
    return [
        CopyRule.whole(entry.name, targets[entry.name])
        for entry in layout.entries
        if entry.alias_of is None or targets[entry.name].data_ptr() != targets[entry.alias_of].data_ptr()
    ]


# -- blocks of elements ---------------------------------------------------------------------------------------------


def _boxes_of(rule: CopyRule, begin: int, end: int) -> Iterator[_CopyBlock]:
    """Yield the rule's elements that are elements ``begin`` to ``end`` of the sent tensor, as few blocks."""
    dims = zip(rule.target.shape, rule.stride, rule.target.stride(), strict=True)
    sized = sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1], reverse=True)
    if rule.target.numel():
        yield from _cut(_merged(sized), rule.offset, int(rule.target.storage_offset()), begin, end)


def _merged(dims: Sequence[tuple[int, int, int]]) -> tuple[tuple[int, int, int], ...]:
    """Return the dimensions, with neighbours that are contiguous on both sides as one."""
    merged: list[tuple[int, int, int]] = []
    for size, sent, target in dims:
        if merged and merged[-1][1:] == (size * sent, size * target):
            merged[-1] = (merged[-1][0] * size, sent, target)
        else:
            merged.append((size, sent, target))
    return tuple(merged)


def _cut(dims: tuple[tuple[int, int, int], ...], sent: int, target: int, begin: int, end: int) -> Iterator[_CopyBlock]:
    """Yield the part of a block between two elements of the sent tensor. ``dims`` have falling strides there."""
    last = sent + sum((size - 1) * stride for size, stride, _ in dims)
    if last < begin or sent >= end:
        return
    if sent >= begin and last < end:
        yield _CopyBlock(dims, sent, target)
        return
    (size, stride, target_stride), inner = dims[0], dims[1:]
    span = last - sent - (size - 1) * stride  # of one index, less one
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


def _copy_of(box: _CopyBlock, target: torch.Tensor, dtype: torch.dtype, shift: int) -> _Copy:
    """Return the copy of ``box``; ``shift`` leads from elements of the tensor to elements of the slab."""
    shape, stride = [dim[0] for dim in box.dims], tuple(dim[1] for dim in box.dims)
    view = target.detach().as_strided(shape, [dim[2] for dim in box.dims], box.target)
    if target.dtype == dtype:  # as integers: a batched copy of small floats may change the bits of a NaN
        dtype = INTEGERS[dtype.itemsize]
        view = view.view(dtype)
    return _Copy(view, (box.sent + shift) * dtype.itemsize, stride, dtype)


def _is_plain(copy: _Copy) -> bool:
    """Return whether the copy is between contiguous memory of one dtype."""
    dense = copy.stride in ((), (1,)) and copy.target.is_contiguous()
    return dense and copy.target.dtype == copy.dtype


def _grouped(copies: Sequence[_Copy]) -> list[list[_Copy]]:
    """Return the copies by what a batched call takes together: one slice would make it copy each by itself."""
    groups: dict[tuple[bool, torch.dtype, torch.dtype], list[_Copy]] = {}
    for copy in copies:
        groups.setdefault((_is_plain(copy), copy.dtype, copy.target.dtype), []).append(copy)
    return list(groups.values())


def _sources(copies: _SlabCopies, memory: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return each group's elements as views of a slot's ``memory``."""
    return [
        [
            memory.view(copy.dtype).as_strided(copy.target.shape, copy.stride, copy.at // copy.dtype.itemsize)
            for copy in group
        ]
        for group in copies.groups
    ]


def _direct_memory(
    layout: WeightLayout, slab: Slab, copies: Sequence[_Copy], device: torch.device
) -> torch.Tensor | None:
    """Return the slab as memory of the targets; None if they lie otherwise, or if bytes between them are not theirs."""
    if not copies or not all(map(_is_plain, copies)):
        return None
    ordered = sorted(copies, key=lambda copy: copy.at)
    storage = ordered[0].target.untyped_storage()
    begin = _first_byte(ordered[0].target) - ordered[0].at
    ends = [0, *(copy.at + copy.target.nbytes for copy in ordered)]
    if ends[-1] != slab.nbytes or ordered[0].at or begin < 0 or (storage.data_ptr() + begin) % 8:
        return None  # the checksum reads 64-bit words
    for copy in ordered:
        same = copy.target.untyped_storage().data_ptr() == storage.data_ptr()
        if not same or _first_byte(copy.target) - copy.at != begin:
            return None
    owns_gaps = storage.nbytes() == layout.nbytes and begin == slab.offset
    gaps = [copy.at - end for copy, end in zip(ordered, ends, strict=False)]
    if min(gaps) < 0 or (max(gaps) > 0 and not (owns_gaps and len(copies) == len(slab.pieces))):
        return None
    memory: torch.Tensor = torch.empty(0, dtype=torch.uint8, device=device)
    return memory.set_(storage, begin, (slab.nbytes,), (1,))


def _first_byte(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset()) * tensor.itemsize


# -- refusals -------------------------------------------------------------------------------------------------------


def _check_target(entry: Entry, target: torch.Tensor | None, device: torch.device) -> None:
    if target is None:
        raise _no_place(entry.name, "the receiver has no tensor of this name")
    if target.dtype != entry.dtype or target.shape != entry.shape:
        sent = f"{entry.dtype} {list(entry.shape)}"
        raise _no_place(entry.name, f"the sender has it as {sent}, the receiver as {target.dtype} {list(target.shape)}")
    if target.device != device:
        raise _no_place(entry.name, f"the receiver has it on {target.device}, and receives on {device}")


def _no_place(name: str, why: str) -> LayoutMismatchError:
    return LayoutMismatchError(
        f"tensor {name!r} cannot be received in place",
        why=why,
        fix="give WeightReceiver(into=…) tensors like the sender's, or receive without it and load what you get",
    )
