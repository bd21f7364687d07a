"""Whole weights out of a sharded model, one after the other, for the rank that sends them."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.interfaces import TrainEngine
from hwrl.weights.source import NamedTensor, WeightSource

_AHEAD_NBYTES = 512 << 20
_DENSE = torch.contiguous_format
_END = -1


@dataclass(frozen=True)
class WeightShard:
    """This rank's part of a tensor of ``shape``, divided along ``dim`` over the first ``ranks`` ranks of a group.

    All parts but the last are of the same size, rounded up; the last ones may have less, or nothing.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    ranks: int


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way: ``whole`` on the first rank, else None. ``landed`` pairs places in it with what arrives."""

    name: str
    nbytes: int
    whole: torch.Tensor | None = None
    landed: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    pending: Sequence[Pending] = ()


def gather_weights(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]], group: Group | None, *, dtype: torch.dtype
) -> Iterator[NamedTensor]:
    """Yield each tensor whole and as ``dtype``, on the first rank of ``group``; elsewhere take part and yield nothing.

    All ranks that hold parts must exhaust it. Parts travel as ``dtype``, to the first rank only, and up to 512 MiB
    ahead of what was yielded: the transfer that reads this goes on meanwhile. A tensor that is not divided costs no
    traffic.
    """
    ahead: collections.deque[_Gathering] = collections.deque()
    limit = 0 if group is None else _AHEAD_NBYTES  # on one rank there is nothing to hide
    under_way = 0
    for name, tensor in named:
        ahead.append(_gather(name, tensor, group, dtype))
        under_way += ahead[-1].nbytes
        while under_way > limit:
            under_way -= ahead[0].nbytes
            yield from _finish(ahead.popleft())
    while ahead:
        yield from _finish(ahead.popleft())


def _finish(one: _Gathering) -> Iterator[NamedTensor]:
    for pending in one.pending:
        pending.wait()
    for place, arrived in one.landed:
        if arrived is not place:
            place.copy_(arrived)
    if one.whole is not None:
        yield one.name, one.whole


def _gather(name: str, tensor: torch.Tensor | WeightShard, group: Group | None, dtype: torch.dtype) -> _Gathering:
    first = group is None or group.rank == 0
    if group is not None and isinstance(tensor, DTensor):
        if tensor.placements == (Shard(0),) and tensor.device_mesh.size() == group.size:
            tensor = WeightShard(tensor.to_local(), tuple(tensor.shape), 0, group.size)
        else:
            tensor = tensor.full_tensor()
    if not isinstance(tensor, WeightShard):
        return _Gathering(name, tensor.numel() * dtype.itemsize, tensor.to(dtype) if first else None)
    assert group is not None, "parts are of several ranks"
    nbytes = math.prod(tensor.shape) * dtype.itemsize
    mine = tensor.tensor.to(dtype).contiguous()
    if not first:
        sent = [group.send(mine, dst=0, async_op=True)] if mine.numel() else []
        return _Gathering(name, nbytes, landed=[(mine, mine)], pending=sent)  # kept alive until it is sent
    whole = torch.empty(tensor.shape, dtype=dtype, device=mine.device)
    places = whole.split(-(-tensor.shape[tensor.dim] // tensor.ranks), tensor.dim)
    places[0].copy_(mine)
    landed = [
        (place, place if place.is_contiguous() else torch.empty_like(place, memory_format=_DENSE)) for place in places
    ]
    received = [
        group.recv(arriving, src=rank, async_op=True)
        for rank, (_, arriving) in enumerate(landed)
        if rank and arriving.numel()
    ]
    return _Gathering(name, nbytes, whole, landed[1:], received)


class SharedWeights:
    """An engine's weights, to be sent: ``model``, the whole model or the base of an adapter, and the ``adapter``.

    On several ranks reading is collective. The first rank iterates inside the context, and the others :meth:`follow`
    until it leaves.
    """

    def __init__(self, engine: TrainEngine, group: Group | None) -> None:
        self._group = group
        self._reads = (engine.named_weights, engine.named_adapter)
        self.model = WeightSource(engine.weights_metadata, functools.partial(self._read, 0))
        self.adapter = WeightSource(engine.adapter_metadata, functools.partial(self._read, 1))

    def follow(self) -> None:
        """Take part in what the first rank reads, until it leaves the context. Blocks."""
        while (part := self._say(_END)) != _END:
            for _ in self._reads[part]():
                pass

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is None or self._group.rank == 0:
            self._say(_END)

    def _read(self, part: int) -> Iterator[NamedTensor]:
        self._say(part)
        weights = self._reads[part]()
        try:
            for pair in weights:  # noqa: UP028 - delegating would close what is yet to be drained
                yield pair
        finally:
            for _ in weights:  # the reader gave up, and the other ranks gather to the end
                pass

    def _say(self, part: int) -> int:
        """Tell all ranks which part the first rank reads next, _END if none; return what it said."""
        if self._group is None:
            return part
        word = torch.tensor([part], dtype=torch.int32, device=self._group.backend.device())
        self._group.broadcast(word, src=0)
        return int(word.item())
