"""The weights to send: :class:`WeightSource`; whole tensors out of shards; reads shared by several ranks."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.errors import WeightsError
from hwrl.interfaces import TrainEngine
from hwrl.weights.layout import NamedTensor

_AHEAD_NBYTES = 512 << 20
_DENSE = torch.contiguous_format
_END = -1
_HOLDS_TENSORS: tuple[type, ...] = (list, tuple, type({}.items()))
"""Collections that keep their items alive; others may make them as they are read."""


@dataclass(frozen=True)
class WeightSource:
    """Named tensors for a transfer to read as often as it needs; ``a + b`` reads both.

    ``metadata`` yields the names with tensors of the right dtype and shape; meta tensors are enough. Aliases of one
    meta tensor mean tied weights. ``read`` yields the tensors themselves, in the same order. With
    ``holds_tensors`` all tensors stay alive between two reads; False: they are made during a read.
    """

    metadata: Callable[[], Iterator[NamedTensor]]
    read: Callable[[], Iterator[NamedTensor]]
    holds_tensors: bool = False

    @classmethod
    def of(cls, weights: WeightSource | Iterable[NamedTensor]) -> WeightSource:
        """Return ``weights`` as a source.

        An iterator can be read only once, so it is read here to its end, and its tensors are held. Any other iterable
        is read again for each attempt.
        """
        if isinstance(weights, WeightSource):
            return weights
        named = list(weights) if isinstance(weights, Iterator) else weights
        return cls(lambda: iter(named), lambda: iter(named), isinstance(named, _HOLDS_TENSORS))

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, *, group: Group | None = None, dtype: torch.dtype | None = None
    ) -> WeightSource:
        """Return the parameters and persistent buffers of ``module``, under the names of its ``state_dict``.

        ``group`` holds the ranks that share the module, sharded by FSDP2 or replicated; None means this rank alone.
        Its first rank reads whole tensors. The others must iterate the source as often: they send their shards and
        yield nothing (:class:`SharedReads` counts the reads). ``dtype`` casts floating-point tensors. Tied tensors
        stay tied. Raises WeightsError if the module is sharded and ``group`` is missing.
        """
        weights = _ModuleWeights(module, group, dtype)
        return cls(weights.metadata, weights.read, holds_tensors=group is None and dtype is None)

    def __iter__(self) -> Iterator[NamedTensor]:
        return self.read()

    def __add__(self, other: WeightSource) -> WeightSource:
        return WeightSource(
            lambda: _chained(self.metadata, other.metadata),
            lambda: _chained(self.read, other.read),
            self.holds_tensors and other.holds_tensors,
        )


class _ModuleWeights:
    def __init__(self, module: torch.nn.Module, group: Group | None, dtype: torch.dtype | None) -> None:
        self._module, self._group, self._dtype = module, group, dtype

    def metadata(self) -> Iterator[NamedTensor]:
        """Yield the tensors if they are sent as they are, so that a flat storage is found; otherwise meta tensors."""
        tensors, tied_to = self._tensors()
        described = {}
        for name, tensor in tensors.items():
            described[name] = tensor if self._is_sent_as_is(tensor) else self._meta(tensor)
            yield name, described[name]
        for name, first in tied_to.items():
            yield name, described[first]

    @torch.no_grad()
    def read(self) -> Iterator[NamedTensor]:
        tensors, tied_to = self._tensors()
        held = {}
        for name, whole in gather_weights(tensors.items(), self._group, dtype=self._dtype):
            if name in tied_to.values():
                held[name] = whole
            yield name, whole
        if self._group is None or self._group.rank == 0:
            yield from ((name, held[first]) for name, first in tied_to.items())

    def _tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return each tensor under its first name, and the first name of each further name.

        All ranks must find the same ties, so this compares objects: an empty shard has no address to compare.
        """
        names: dict[int, str] = {}
        tensors, tied_to = {}, {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue  # a module's extra state
            if id(tensor) in names:
                tied_to[name] = names[id(tensor)]
                continue
            names[id(tensor)] = name
            tensors[name] = self._without_mesh(name, tensor.detach())
        return tensors, tied_to

    def _without_mesh(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if self._group is not None or not isinstance(tensor, DTensor):
            return tensor
        ranks = tensor.device_mesh.size()
        if ranks > 1:
            raise WeightsError(
                f"tensor {name!r} cannot be read whole",
                why=f"the module is sharded over {ranks} ranks",
                fix="give WeightSource.from_module the group of these ranks",
            )
        return tensor.to_local()

    def _is_sent_as_is(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, DTensor) and (self._dtype in (None, tensor.dtype))

    def _meta(self, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
        return torch.empty(tensor.shape, dtype=dtype, device="meta")


def _chained(*reads: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
    for read in reads:
        yield from read()


# -- whole tensors out of shards -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of a tensor of ``shape``, divided along ``dim`` over the first ``ranks`` ranks of a group.

    Shards are of equal size, rounded up; the last ones may be smaller or empty. ``owners`` are the ranks that have the
    shards, in order, if these are others; any other rank has an empty ``tensor`` of the right dtype and device.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    ranks: int
    owners: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way. On the first rank ``whole`` is the tensor; each part of it is received into a buffer.

    A buffer is the part itself if the part is contiguous. On the other ranks ``sent`` keeps the shard under way alive.
    """

    name: str
    nbytes: int
    whole: torch.Tensor | None = None
    part_buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    pending: Sequence[Pending] = ()
    sent: torch.Tensor | None = None


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
    for part, buffer in one.part_buffers:
        if buffer is not part:
            part.copy_(buffer)
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
    mine = tensor.tensor.to(wanted).contiguous()  # empty if other ranks have the shards
    pending = [group.send(mine, dst=0, async_op=True)] if mine.numel() else []
    nbytes = math.prod(tensor.shape) * wanted.itemsize
    return _Gathering(name, nbytes, pending=pending, sent=mine)


def _receive_shards(name: str, shard: WeightShard, group: Group, dtype: torch.dtype) -> _Gathering:
    mine = shard.tensor.to(dtype).contiguous()
    whole = torch.empty(shard.shape, dtype=dtype, device=mine.device)
    parts = whole.split(-(-shard.shape[shard.dim] // shard.ranks), shard.dim)
    others: list[tuple[torch.Tensor, torch.Tensor]] = []
    pending = []
    for rank, part in zip(shard.owners or range(shard.ranks), parts, strict=False):  # small tensors have fewer parts
        if rank == 0:
            part.copy_(mine)
        elif part.numel():
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=_DENSE)
            pending.append(group.recv(buffer, src=rank, async_op=True))
            others.append((part, buffer))
    return _Gathering(name, whole.nbytes, whole, others, pending)


# -- reads of all ranks together -------------------------------------------------------------------------------------


class SharedReads:
    """Sources that all ranks of ``group`` must read together, for example shards of one model.

    The first rank gives ``sources`` to a sender inside the context; a transfer may read them several times or not at
    all. The other ranks :meth:`follow` until the first rank leaves the context. ``group`` None means this rank alone.
    """

    def __init__(self, sources: Sequence[WeightSource], group: Group | None) -> None:
        self._group = group
        self._originals = sources
        self.sources = tuple(
            WeightSource(source.metadata, functools.partial(self._read, number))
            for number, source in enumerate(sources)
        )

    def follow(self) -> None:
        """Take part in each read of the first rank, until it leaves the context. Blocks."""
        while (number := self._announce(_END)) != _END:
            for _ in self._originals[number]:
                pass

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is None or self._group.rank == 0:
            self._announce(_END)

    def _read(self, number: int) -> Iterator[NamedTensor]:
        self._announce(number)
        weights = iter(self._originals[number])
        try:
            for pair in weights:  # noqa: UP028 - delegating would close the iterator before it is drained
                yield pair
        finally:
            for _ in weights:  # the reader stopped early, and the other ranks gather to the end
                pass

    def _announce(self, number: int) -> int:
        """Broadcast the number of the source that the first rank reads next, _END if none; return its number."""
        if self._group is None:
            return number
        word = torch.tensor([number], dtype=torch.int32, device=self._group.backend.device())
        self._group.broadcast(word, src=0)
        return int(word.item())


class SharedWeights(SharedReads):
    """An engine's weights as shared reads: ``model``, the whole model or an adapter's base, and the ``adapter``."""

    model: WeightSource
    adapter: WeightSource

    def __init__(self, engine: TrainEngine, group: Group | None) -> None:
        model = WeightSource(engine.weights_metadata, engine.named_weights)
        super().__init__([model, WeightSource(engine.adapter_metadata, engine.named_adapter)], group)
        self.model, self.adapter = self.sources

    def __enter__(self) -> SharedWeights:
        return self
