"""Record the copies of one weight load, and repeat them in later loads.

In each load vLLM runs a model's loaders, in Python, only to find where each tensor goes. If the loaders do nothing but
copy, a :class:`CopyPlan` does the same work without them.

The *given tensors* are the weights that the loaders get, under the names of the model's files.
"""

from __future__ import annotations

import bisect
import gc
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hwrl.weights import CopyRule

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class _TensorView:
    """A view of the given tensor ``name``. It begins ``offset`` elements after the tensor's first element."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Write:
    """Elements ``begin`` to ``end`` (exclusive) of a storage come from ``source``: a view or a number."""

    begin: int
    end: int
    source: _TensorView | float


@dataclass(frozen=True)
class CopyPlan:
    """Each target in a model with its source: a view of a given tensor (``copies``) or a number (``constants``)."""

    copies: list[tuple[torch.Tensor, _TensorView]]
    constants: list[tuple[torch.Tensor, float]]

    def suits(self, names: Collection[str]) -> bool:
        """Return whether ``names`` has every tensor that the plan reads. It may have more."""
        return all(part.name in names for _, part in self.copies)

    def rules(self) -> list[CopyRule]:
        """Return the copies as rules by which a receiver writes into the targets."""
        return [CopyRule(part.name, target, part.stride, part.offset) for target, part in self.copies]

    def staged(self) -> CopyPlan:
        """Return a plan with the same copies into new tensors beside the targets, for :meth:`install`. No constants."""
        return CopyPlan([(torch.empty_like(target), part) for target, part in self.copies], [])

    @torch.no_grad()
    def install(self, staged: CopyPlan) -> None:
        """Copy the tensors of ``staged`` into these targets, and fill the constants. Does not wait for the device."""
        torch._foreach_copy_([target for target, _ in self.copies], [tensor for tensor, _ in staged.copies])
        for target, value in self.constants:
            target.fill_(value)

    @torch.no_grad()
    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load ``weights``, contiguous and in the recorded shapes. Does not wait for the device."""
        for target, part in self.copies:
            target.copy_(part.of(weights[part.name]))
        for target, value in self.constants:
            target.fill_(value)


class Recorder(TorchDispatchMode):
    """A context that records how loaders bring contiguous ``weights`` into a model; :meth:`plan` is the result.

    A copy may go through other tensors on its way into a parameter. With ``skips_copies`` copies from ``weights`` are
    recorded but not made, so their targets stay arbitrary. There is no plan if a loader computes with the weights, or
    keeps a copy of them outside the parameters; then :attr:`obstacle` is the first reason.
    """

    obstacle = ""

    def __init__(self, weights: Mapping[str, torch.Tensor], *, skips_copies: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._weights, self._skips_copies = weights, skips_copies
        # For each storage of given tensors: their first bytes, with their names.
        self._given: dict[StorageWeakRef, list[tuple[int, str]]] = defaultdict(list)
        for name, tensor in weights.items():
            if tensor.numel():
                self._given[_storage(tensor)].append((_offset(tensor) * tensor.itemsize, name))
        for begins in self._given.values():
            begins.sort()
        self._writes: dict[StorageWeakRef, list[_Write]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = self._skips_copies and func is _COPY and _storage(args[1]) in self._given
        result = args[0] if skipped else func(*args, **(kwargs or {}))
        if func is _COPY and not args[0].is_meta:
            self._note_copy(args[0], args[1])
        elif func in _FILLS and not args[0].is_meta:
            self._note_fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
        elif func is not _COPY and not func.is_view and any(map(self._is_of_weights, tree_leaves((args, kwargs)))):
            self._give_up(f"{func} computes with the weights")
        return result

    def plan(self, parameters: Iterable[torch.Tensor]) -> CopyPlan | None:
        """Return the plan that fills ``parameters``; None if an element has no source or two, or is not only copied."""
        by_storage = {_storage(parameter): parameter.data for parameter in parameters}
        if self._kept_elsewhere(by_storage.keys()):
            gc.collect()  # a cycle may hold a tensor that nothing uses
        if self._kept_elsewhere(by_storage.keys()):
            self._give_up("copies of the weights are kept outside the parameters")
        if self.obstacle:
            return None
        plan = CopyPlan([], [])
        for storage, parameter in by_storage.items():
            # A loader may run twice, and then writes the same again.
            writes = sorted(dict.fromkeys(self._writes.get(storage, [])), key=lambda write: write.begin)
            if not _tile(writes, parameter):
                self._give_up(f"a parameter of shape {tuple(parameter.shape)} is not written once and whole")
                return None
            for write in writes:
                target = parameter.as_strided((write.end - write.begin,), (1,), write.begin)
                if isinstance(write.source, _TensorView):
                    plan.copies.append((target.view(write.source.shape), write.source))
                else:
                    plan.constants.append((target, write.source))
        return plan

    def _kept_elsewhere(self, parameters: Set[StorageWeakRef]) -> bool:
        """Return whether a tensor outside the parameters has a copy of the weights, and is still alive."""
        copied = (
            storage
            for storage, writes in self._writes.items()
            if any(isinstance(w.source, _TensorView) for w in writes)
        )
        return any(not storage.expired() for storage in copied if storage not in parameters)

    def _note_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if not to.numel():
            return
        if not self._is_of_weights(source):
            if self._is_of_weights(to):
                self._give_up("something else is copied over the weights")
        elif to.shape != source.shape or not to.is_contiguous():
            self._give_up("a copy broadcasts, or has a target that is not contiguous")
        elif _storage(source) in self._given:
            self._add(to, self._part(source))
        elif source.is_contiguous() and source.nbytes == _nbytes(source) and source.dtype == to.dtype:
            self._writes[_storage(to)] += [
                replace(write, begin=write.begin + _offset(to), end=write.end + _offset(to))
                for write in self._writes[_storage(source)]
            ]
        else:
            self._give_up("a part of a copy, or a copy in another dtype, is copied again")

    def _note_fill(self, to: torch.Tensor, value: float) -> None:
        if not to.numel():
            return
        if not to.is_contiguous():
            self._give_up("a fill has a target that is not contiguous")
        self._add(to, value)

    def _add(self, to: torch.Tensor, source: _TensorView | float | None) -> None:
        if source is None:
            self._give_up("the weights are viewed as another dtype")
        else:
            begin = _offset(to)
            self._writes[_storage(to)].append(_Write(begin, begin + to.numel(), source))

    def _give_up(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _part(self, view: torch.Tensor) -> _TensorView | None:
        """Return ``view`` as a view of a given tensor; None if its dtype is not the tensor's."""
        begins = self._given[_storage(view)]
        begin = _offset(view) * view.itemsize
        _, name = begins[bisect.bisect_right(begins, begin, key=lambda item: item[0]) - 1]
        tensor = self._weights[name]
        if view.dtype != tensor.dtype:
            return None
        return _TensorView(name, tuple(view.shape), view.stride(), _offset(view) - _offset(tensor))

    def _is_of_weights(self, value: Any) -> bool:
        """Return whether ``value`` is a given tensor, a view or a copy of one, or has a recorded constant."""
        return (
            isinstance(value, torch.Tensor)
            and not value.is_meta
            and (_storage(value) in self._given or bool(self._writes.get(_storage(value))))
        )


def _tile(writes: Sequence[_Write], parameter: torch.Tensor) -> bool:
    """Return whether ``writes``, sorted, write each element of the parameter once, and it has a storage for itself."""
    begins, ends = [write.begin for write in writes], [write.end for write in writes]
    whole = parameter.numel() and _nbytes(parameter) == parameter.nbytes
    return bool(whole) and [*begins, parameter.numel()] == [0, *ends]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return a weak reference to the tensor's storage. While it exists, no other storage has an equal one."""
    return StorageWeakRef(tensor.untyped_storage())


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
