"""What loading a model comes to: copies out of the given tensors, recorded once and then repeated by themselves.

vLLM finds a tensor's place in its model by running the model's loaders, in Python, each time. Where those do nothing
but copy, a :class:`CopyPlan` does the same without them.
"""

from __future__ import annotations

import bisect
import gc
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COPY = torch.ops.aten.copy_.default
_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)


@dataclass(frozen=True)
class _TensorView:
    """A part of the given tensor ``name``: ``shape`` and ``stride``, from element ``offset`` on."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True)
class _Write:
    """Elements ``begin`` to ``end`` of a storage, contiguous, come from ``source``: a part, or a constant."""

    begin: int
    end: int
    source: _TensorView | float


@dataclass(frozen=True)
class CopyPlan:
    """Pairs of places in a model and what they get: parts of given tensors, and constants."""

    copies: list[tuple[torch.Tensor, _TensorView]]
    constants: list[tuple[torch.Tensor, float]]

    def suits(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Return whether ``weights`` have every tensor that is copied; which of two tied ones is given may vary."""
        return all(part.name in weights for _, part in self.copies)

    @torch.no_grad()
    def run(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load contiguous ``weights`` of the shapes that were recorded; does not wait for the device."""
        for place, part in self.copies:
            place.copy_(part.of(weights[part.name]))
        for place, value in self.constants:
            place.fill_(value)


class Recorder(TorchDispatchMode):
    """Watches, as a context, how contiguous ``weights`` get into a model; :meth:`plan` is what was seen.

    A copy by way of another tensor is followed. Where values are computed from the weights, in whatever way, or kept
    anywhere but in the parameters, there is no plan, and :attr:`obstacle` says why.
    """

    obstacle = ""

    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self._weights = weights
        self._given: dict[StorageWeakRef, list[tuple[int, str]]] = defaultdict(list)
        for name, tensor in weights.items():
            if tensor.numel():
                self._given[_storage(tensor)].append((_offset(tensor) * tensor.itemsize, name))
        for begins in self._given.values():
            begins.sort()
        self._writes: dict[StorageWeakRef, list[_Write]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _COPY and not args[0].is_meta:
            self._note_copy(args[0], args[1])
        elif func in _FILLS and not args[0].is_meta:
            self._note_fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
        elif func is not _COPY and not func.is_view and any(map(self._is_of_weights, tree_leaves((args, kwargs)))):
            self._give_up(f"{func} computes with the weights")
        return result

    def plan(self, parameters: Iterable[torch.Tensor]) -> CopyPlan | None:
        """Return what fills ``parameters``, or None: every element must have one source, and only by copies."""
        by_storage = {_storage(parameter): parameter.data for parameter in parameters}
        if self._kept_elsewhere(by_storage.keys()):
            gc.collect()
        if self._kept_elsewhere(by_storage.keys()):
            self._give_up("what came out of the weights is kept beside the parameters")
        if self.obstacle:
            return None
        plan = CopyPlan([], [])
        for storage, parameter in by_storage.items():
            # A loader that runs again writes the same again.
            writes = sorted(dict.fromkeys(self._writes.get(storage, [])), key=lambda write: write.begin)
            if not _tile(writes, parameter):
                self._give_up(f"a parameter of shape {tuple(parameter.shape)} is not written once and whole")
                return None
            for write in writes:
                place = parameter.as_strided((write.end - write.begin,), (1,), write.begin)
                if isinstance(write.source, _TensorView):
                    plan.copies.append((place.view(write.source.shape), write.source))
                else:
                    plan.constants.append((place, write.source))
        return plan

    def _kept_elsewhere(self, parameters: Set[StorageWeakRef]) -> bool:
        """Return whether something that came out of the weights is still held, and is no parameter."""
        copied = (
            storage
            for storage, writes in self._writes.items()
            if any(isinstance(w.source, _TensorView) for w in writes)
        )
        return any(not storage.expired() for storage in copied if storage not in parameters)

    def _note_copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if not self._is_of_weights(source):
            if self._is_of_weights(to):
                self._give_up("something else is copied over the weights")
        elif to.shape != source.shape or not to.is_contiguous():
            self._give_up("a copy broadcasts, or goes where it is not contiguous")
        elif _storage(source) in self._given:
            self._add(to, self._part(source))
        elif source.is_contiguous() and source.nbytes == _nbytes(source) and source.dtype == to.dtype:
            self._writes[_storage(to)] += [
                replace(write, begin=write.begin + _offset(to), end=write.end + _offset(to))
                for write in self._writes[_storage(source)]
            ]
        else:
            self._give_up("a part of a copy, or a copy in another dtype, is copied on")

    def _note_fill(self, to: torch.Tensor, value: float) -> None:
        if not to.numel():
            return
        if not to.is_contiguous():
            self._give_up("a fill goes where it is not contiguous")
        self._add(to, value)

    def _add(self, to: torch.Tensor, source: _TensorView | float | None) -> None:
        if source is None:
            self._give_up("the weights are seen as another dtype")
        else:
            begin = _offset(to)
            self._writes[_storage(to)].append(_Write(begin, begin + to.numel(), source))

    def _give_up(self, why: str) -> None:
        self.obstacle = self.obstacle or why

    def _part(self, view: torch.Tensor) -> _TensorView | None:
        """Return which part of which given tensor ``view`` is; None if it is seen as another dtype."""
        begins = self._given[_storage(view)]
        begin = _offset(view) * view.itemsize
        _, name = begins[bisect.bisect_right(begins, begin, key=lambda item: item[0]) - 1]
        tensor = self._weights[name]
        if view.dtype != tensor.dtype:
            return None
        return _TensorView(name, tuple(view.shape), view.stride(), _offset(view) - _offset(tensor))

    def _is_of_weights(self, value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and not value.is_meta
            and (_storage(value) in self._given or bool(self._writes.get(_storage(value))))
        )


def _tile(writes: Sequence[_Write], parameter: torch.Tensor) -> bool:
    """Return whether ``writes``, in order, cover all of the parameter and its storage, each element once."""
    begins, ends = [write.begin for write in writes], [write.end for write in writes]
    whole = parameter.numel() and _nbytes(parameter) == parameter.nbytes
    return bool(whole) and [*begins, parameter.numel()] == [0, *ends]


def _storage(tensor: torch.Tensor) -> StorageWeakRef:
    """Return what names the tensor's storage, and no other's, while it is kept."""
    return StorageWeakRef(tensor.untyped_storage())


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _nbytes(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage().nbytes())
