"""Whole tensors out of a sharded model, one after the other, on the rank that sends them."""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.weights.layout import NamedTensor

_AHEAD_NBYTES = 512 << 20
_DENSE = torch.contiguous_format


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of a tensor of ``shape``, divided along ``dim`` over the first ``ranks`` ranks of a group.

    Shards are of equal size, rounded up; the last ones may be smaller or empty.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    ranks: int


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way. ``whole`` is None except on the first rank; ``landed`` pairs its parts with buffers."""

    name: str
    nbytes: int
    whole: torch.Tensor | None = None
    landed: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    pending: Sequence[Pending] = ()


def gather_weights(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]], group: Group | None, *, dtype: torch.dtype | None
) -> Iterator[NamedTensor]:
    """Yield each tensor whole on the first rank of ``group``; on the others, send the shards and yield nothing.

    Floating-point tensors travel as ``dtype``, None: as they are. All ranks of the group must exhaust this iterator.
    Shards travel to the first rank only, up to 512 MiB ahead of the yielded tensor, while the caller works with it.
    Replicated tensors cost no traffic.
    """
    ahead: collections.deque[_Gathering] = collections.deque()
    limit = 0 if group is None else _AHEAD_NBYTES  # one rank has no traffic to hide
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
    for part, received in one.landed:
        if received is not part:
            part.copy_(received)
    if one.whole is not None:
        yield one.name, one.whole


def _gather(
    name: str, tensor: torch.Tensor | WeightShard, group: Group | None, dtype: torch.dtype | None
) -> _Gathering:
    if group is not None and isinstance(tensor, DTensor):
        if tensor.placements == (Shard(0),) and tensor.device_mesh.size() == group.size:
            tensor = WeightShard(tensor.to_local(), tuple(tensor.shape), 0, group.size)
        else:
            tensor = tensor.full_tensor()
    local = tensor.tensor if isinstance(tensor, WeightShard) else tensor
    wanted = dtype if dtype is not None and local.is_floating_point() else local.dtype
    if not isinstance(tensor, WeightShard):
        first = group is None or group.rank == 0
        return _Gathering(name, tensor.numel() * wanted.itemsize, tensor.to(wanted) if first else None)
    assert group is not None, "shards are of several ranks"
    if group.rank == 0:
        return _receive_shards(name, tensor, group, wanted)
    mine = tensor.tensor.to(wanted).contiguous()
    sent = [group.send(mine, dst=0, async_op=True)] if mine.numel() else []
    nbytes = math.prod(tensor.shape) * wanted.itemsize
    return _Gathering(name, nbytes, landed=[(mine, mine)], pending=sent)  # keeps the shard alive until it is sent


def _receive_shards(name: str, shard: WeightShard, group: Group, dtype: torch.dtype) -> _Gathering:
    mine = shard.tensor.to(dtype).contiguous()
    whole = torch.empty(shard.shape, dtype=dtype, device=mine.device)
    parts = whole.split(-(-shard.shape[shard.dim] // shard.ranks), shard.dim)
    parts[0].copy_(mine)
    landed = [(part, part if part.is_contiguous() else torch.empty_like(part, memory_format=_DENSE)) for part in parts]
    received = [
        group.recv(received, src=rank, async_op=True)
        for rank, (_, received) in enumerate(landed)
        if rank and received.numel()
    ]
    return _Gathering(name, whole.nbytes, whole, landed[1:], received)
