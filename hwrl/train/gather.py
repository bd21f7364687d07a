"""Whole weights out of a sharded model, one after the other, for the rank that sends them."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.train.engine import TrainEngine

_AHEAD_NBYTES = 512 << 20

NamedTensor = tuple[str, torch.Tensor]


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way: ``whole`` on the first rank, else None. ``part`` is what this rank sends."""

    name: str
    nbytes: int
    whole: torch.Tensor | None = None
    part: torch.Tensor | None = None
    pending: Sequence[Pending] = ()


def gathered(named: Iterable[NamedTensor], group: Group | None, *, dtype: torch.dtype) -> Iterator[NamedTensor]:
    """Yield each tensor whole and as ``dtype``, on the first rank of ``group``; elsewhere take part and yield nothing.

    All ranks must exhaust it. Shards travel as ``dtype``, to the first rank only, and up to 512 MiB ahead of what was
    yielded: the transfer that reads this goes on meanwhile. A tensor that is not sharded costs no traffic.
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
    if one.whole is not None:
        yield one.name, one.whole


def _gather(name: str, tensor: torch.Tensor, group: Group | None, dtype: torch.dtype) -> _Gathering:
    nbytes = tensor.numel() * dtype.itemsize
    first = group is None or group.rank == 0
    if group is None or not isinstance(tensor, DTensor):
        return _Gathering(name, nbytes, tensor.to(dtype) if first else None)
    if tensor.placements != (Shard(0),) or tensor.device_mesh.size() != group.size:
        whole = tensor.full_tensor()
        return _Gathering(name, nbytes, whole.to(dtype) if first else None)
    mine = tensor.to_local().to(dtype).contiguous()
    if not first:
        sent = [group.send(mine, dst=0, async_op=True)] if mine.numel() else []
        return _Gathering(name, nbytes, part=mine, pending=sent)
    whole = torch.empty(tensor.shape, dtype=dtype, device=mine.device)
    whole[: len(mine)].copy_(mine)
    parts = enumerate(whole.split(-(-len(whole) // group.size)))  # FSDP2 divides so: the last may have less, or nothing
    received = [group.recv(part, src=rank, async_op=True) for rank, part in parts if rank and part.numel()]
    return _Gathering(name, nbytes, whole, pending=received)


class SharedWeights:
    """An engine's weights as :meth:`~hwrl.weights.WeightSender.publish` reads them: as often as it must.

    On several ranks reading is collective. The first rank iterates inside the context, and the others :meth:`follow`
    until it leaves.
    """

    def __init__(self, engine: TrainEngine, group: Group | None) -> None:
        self._engine, self._group = engine, group

    def metadata(self) -> Iterator[NamedTensor]:
        """Yield names with tensors on the meta device; reads nothing from the other ranks."""
        return self._engine.weights_metadata()

    def __iter__(self) -> Iterator[NamedTensor]:
        self._say(going_on=True)
        weights = self._engine.named_weights()
        try:
            for pair in weights:  # noqa: UP028 - delegating would close what is yet to be drained
                yield pair
        finally:
            for _ in weights:  # the reader gave up, and the other ranks gather to the end
                pass

    def follow(self) -> None:
        """Take part in what the first rank reads, until it leaves the context. Blocks."""
        while self._say(going_on=False):
            for _ in self._engine.named_weights():
                pass

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is None or self._group.rank == 0:
            self._say(going_on=False)

    def _say(self, *, going_on: bool) -> bool:
        """Tell all ranks what the first rank says."""
        if self._group is None:
            return going_on
        word = torch.tensor([going_on], dtype=torch.int32, device=self._group.backend.device())
        self._group.broadcast(word, src=0)
        return bool(word.item())
