"""Trainer ranks that hold shards of a hard list of tensors, and receivers that compare what arrives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from hwrl.comm import Comm, Group, Store, connect_store, raw_bytes
from hwrl.interfaces import Backend
from hwrl.weights import TransferReport, WeightReceiver, WeightSender, WeightShard, WeightSource, gather_weights
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow

BUCKET_NBYTES = 4096
Named = list[tuple[str, torch.Tensor]]


def hard_weights(version: int) -> Named:
    """Return 0-d, empty, odd, tied, strided, mixed-dtype tensors, and some larger than a bucket."""
    made = torch.Generator().manual_seed(version)
    embed = torch.randn(61, 40, generator=made)
    return [
        ("embed", embed),
        ("scale", torch.tensor(float(version))),
        ("odd", torch.randint(0, 256, (1001,), dtype=torch.uint8, generator=made)),
        ("turned", torch.randn(50, 60, generator=made).T.contiguous()),
        ("half", torch.randn(33, 3, generator=made).to(torch.bfloat16)),
        ("strided", torch.randn(40, 9, generator=made)[:, ::2]),
        ("mask", torch.randn(77, generator=made) > 0),
        ("eighth", torch.randn(130, generator=made).to(torch.float8_e4m3fn)),
        ("empty", torch.empty(0, 3)),
        *((f"layer.{number}", torch.randn(37, 16 + number, generator=made)) for number in range(12)),
        ("step", torch.tensor([version])),
        ("last", torch.randn(3, 5, generator=made)),
        ("head", embed),
    ]


_DIMS = {"embed": 0, "turned": 1, "odd": 0, "half": 0, "last": 0}
_DIMS |= {f"layer.{number}": number % 2 for number in range(12)}
"""The dimension that ranks divide, of the tensors that are not replicated; ``last`` has fewer rows than 4 ranks."""


def sharded(group: Group, version: int) -> WeightSource:
    """Return the weights as a source whose tensors are divided over the ranks of ``group``, or replicated."""
    named = hard_weights(version)

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        shards = ((name, _shard(name, tensor, group)) for name, tensor in named if name != "head")
        embed = None
        for name, whole in gather_weights(shards, group, dtype=None):
            embed = whole if name == "embed" else embed
            yield name, whole
        if embed is not None:
            yield "head", embed

    return WeightSource(lambda: _described(named), read)


def _described(named: Named) -> Iterator[tuple[str, torch.Tensor]]:
    described = {name: tensor.to("meta") for name, tensor in named}
    yield from (described | {"head": described["embed"]}).items()


def _shard(name: str, tensor: torch.Tensor, group: Group) -> torch.Tensor | WeightShard:
    if name not in _DIMS:
        return tensor
    dim = _DIMS[name]
    parts = tensor.split(-(-tensor.shape[dim] // group.size), dim)
    mine = parts[group.rank] if group.rank < len(parts) else tensor.narrow(dim, 0, 0)
    return WeightShard(mine, tuple(tensor.shape), dim, range(group.size))


class TrainerSide:
    """A rank of the sending side. A context manager."""

    def __init__(
        self, address: str, rank: int, ranks: int, senders: int, *, backend: Backend | None = None, **options: Any
    ) -> None:
        self.backend = backend or CpuBackend(INFO)
        self.store: Store = connect_store(address)
        comm = Comm(CpuBackend(INFO))
        self.group = comm.standalone_group(connect_store(address), rank=rank, size=ranks, name="trainer")
        options = {"bucket_nbytes": BUCKET_NBYTES, "timeout_s": slow(20.0)} | options
        self.sender = WeightSender(self.store, group=self.group, backend=self.backend, senders=senders, **options)

    def __enter__(self) -> TrainerSide:
        return self

    def __exit__(self, *exc: object) -> None:
        self.sender.close()
        self.group.close()

    def send(self, version: int, source: WeightSource | None = None) -> TransferReport:
        """Send the weights of ``version``."""
        return self.sender.publish(version, source or sharded(self.group, version))


def receive_all(address: str, replica: str, versions: int, *, backend: Backend | None = None, **options: Any) -> bool:
    """Receive versions 1 to ``versions``; return whether each was bit-exact."""
    with WeightReceiver(
        connect_store(address), replica=replica, backend=backend or CpuBackend(INFO), **options
    ) as receiver:
        exact, last = True, 0
        while last < versions:
            received = receiver.receive(timeout_s=300.0)
            last = received.version
            exact &= is_exact(received, last)
        return exact


def is_exact(received: Any, version: int, *, tied: bool = True) -> bool:
    """Return whether the tensors have the bits of :func:`hard_weights`, and ``head`` is ``tied`` to ``embed``."""
    expected = hard_weights(version)
    same = list(received) == [name for name, _ in expected] and all(
        received[name].dtype == tensor.dtype
        and received[name].shape == tensor.shape
        and torch.equal(raw_bytes(received[name].contiguous()), raw_bytes(tensor.contiguous()))
        for name, tensor in expected
    )
    return same and (received["head"].data_ptr() == received["embed"].data_ptr()) is tied
