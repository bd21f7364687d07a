"""The weights to send: :class:`WeightSource`; whole tensors out of shards."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.errors import WeightsError
from hwrl.weights.chapters import Chapters
from hwrl.weights.layout import NamedTensor

AHEAD_NBYTES = 512 << 20
_log = logging.getLogger("hwrl.weights")
_DENSE = torch.contiguous_format
_HOLDS_TENSORS: tuple[type, ...] = (list, tuple, type({}.items()))
"""Collections that keep their items alive; others may make them as they are read."""


@dataclass(frozen=True)
class WeightSource:
    """Named tensors for a transfer to read as often as it needs; ``a + b`` reads both.

    ``metadata`` returns an iterator of names and tensors. Only their dtypes and shapes count, so meta tensors are
    enough; two names of the same meta tensor object mean tied weights. ``read`` returns an iterator of the tensors
    themselves, in the same order.

    ``holds_tensors`` says that all tensors stay alive between two reads; otherwise they are made during a read.
    ``one_shot`` says that ``read`` works only once. A transfer that breaks then fails instead of being repeated.
    :class:`~hwrl.weights.SharedReads` sets ``shared``, for sources that several ranks read together. The sender sets
    ``chapters``.
    """

    metadata: Callable[[], Iterator[NamedTensor]]
    read: Callable[[], Iterator[NamedTensor]]
    holds_tensors: bool = False
    shared: SourceSelection | None = None
    one_shot: bool = False
    chapters: Chapters | None = None

    @classmethod
    def of(cls, weights: WeightSource | Iterable[NamedTensor]) -> WeightSource:
        """Return ``weights`` as a source.

        An iterator can be read only once, so it is read here to its end, and its tensors are held; give it to
        :meth:`~hwrl.weights.WeightSender.publish` itself, which holds some of them. Any other iterable is read again
        for each attempt.
        """
        if isinstance(weights, WeightSource):
            return weights
        named = list(weights) if isinstance(weights, Iterator) else weights
        return cls(lambda: iter(named), lambda: iter(named), isinstance(named, _HOLDS_TENSORS))

    @classmethod
    def of_known_layout(cls, read: Callable[[], Iterator[NamedTensor]], *, one_shot: bool = False) -> WeightSource:
        """Return a source without metadata, for a transfer that has the layout already."""
        return cls(lambda: iter(()), read, one_shot=one_shot)

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, *, group: Group | None = None, dtype: torch.dtype | None = None
    ) -> WeightSource:
        """Return the parameters and persistent buffers of ``module``, under the names of its ``state_dict``.

        ``group`` holds the ranks that share the module, sharded by FSDP2 or replicated; None means this rank alone.
        Its first rank reads whole tensors. The others must iterate the source as often: they send their shards and
        yield nothing (:class:`SharedReads` counts the reads, and lets several ranks read whole tensors). ``dtype``
        casts floating-point tensors. Tied tensors stay tied. Raises WeightsError if the module is sharded and
        ``group`` is missing.
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
            None if self.shared is None or other.shared is None else self.shared + other.shared,
            self.one_shot or other.one_shot,
        )


class JointReads(Protocol):
    """Reads that several ranks make together: :class:`~hwrl.weights.SharedReads`."""

    @property
    def ranks(self) -> int:
        """How many ranks read together."""

    def read(
        self, numbers: Sequence[int], gatherers: Gatherers | None = None, in_round: tuple[str, int] | None = None
    ) -> Iterator[NamedTensor]:
        """Yield the first rank's tensors of the sources ``numbers``."""

    def release(self, link: str) -> None:
        """Let the co-senders of ``link`` close their connections and free their device memory."""


@dataclass(frozen=True)
class SourceSelection:
    """The sources ``numbers`` of ``reads``, read one after the other."""

    reads: JointReads
    numbers: tuple[int, ...]

    def __add__(self, other: SourceSelection) -> SourceSelection | None:
        return SourceSelection(self.reads, self.numbers + other.numbers) if self.reads is other.reads else None

    def for_round(self, source: WeightSource, link: str, number: int, gatherers: Gatherers) -> WeightSource:
        """Return ``source``, read for proposal ``number`` of ``link``: the first read begins the co-senders' part."""
        return WeightSource(
            source.metadata, functools.partial(self.reads.read, self.numbers, gatherers, (link, number))
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
        yield from ((name, held[first]) for name, first in tied_to.items() if first in held)

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


def drain(weights: Iterator[NamedTensor]) -> None:
    """Read ``weights`` to their end, and drop them. An error of theirs is logged.

    Making tensors may be a collective operation: other ranks would wait forever for a rank that stops early.
    """
    try:
        with torch.no_grad():
            for _ in weights:
                pass
    except Exception:  # noqa: BLE001 - the caller is about to get the first error, which says more
        _log.warning("the weights could not be read to their end", exc_info=True)


def _chained(*reads: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
    for read in reads:
        yield from read()


# -- whole tensors out of shards -------------------------------------------------------------------------------------

Parts = Callable[[str, torch.Tensor], Iterator[NamedTensor]]
"""Divides a tensor into named tensors, views of it."""


class Gatherers:
    """The ranks that get each tensor whole: ``of_tensor`` by its name, and ``ranks``, all of them. In rank order."""

    def __init__(self, ranks: Sequence[int], of_tensor: Mapping[str, Sequence[int]]) -> None:
        self._ranks, self._of_tensor = ranks, of_tensor
        self._of_divided: dict[str, Sequence[int]] = {}

    def ranks_for(self, name: str, shape: Sequence[int], parts: Parts | None) -> Sequence[int]:
        """Return the ranks that get tensor ``name``, or one of its parts; all if its name is unknown."""
        known = self._of_tensor.get(name)
        if known is not None or parts is None:
            return self._ranks if known is None else known
        if name not in self._of_divided:
            names = [part for part, _ in parts(name, torch.empty(*shape, device="meta"))]
            self._of_divided[name] = sorted({rank for part in names for rank in self._of_tensor.get(part, self._ranks)})
        return self._of_divided[name]


_gatherers: ContextVar[Gatherers | None] = ContextVar("gatherers", default=None)


@contextlib.contextmanager
def gathering_to(gatherers: Gatherers | None) -> Iterator[None]:
    """Let :func:`gather_weights` in this context gather to these ranks; None: to the first rank.

    It is a context and no argument, because the call is inside a train engine.
    """
    token = _gatherers.set(gatherers)
    try:
        yield
    finally:
        _gatherers.reset(token)


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

    @property
    def holders(self) -> Sequence[int]:
        """The ranks that have the shards, in order."""
        return self.owners or range(self.ranks)


@dataclass(frozen=True)
class _Gathering:
    """A tensor on its way. On a gathering rank ``whole`` is the tensor; each part of it is received into a buffer.

    A buffer is the part itself if the part is contiguous. On the other ranks ``sent`` keeps the shard under way alive.
    """

    name: str
    whole: torch.Tensor | None = None
    part_buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    pending: Sequence[Pending] = ()
    sent: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The memory that this rank holds for it."""
        return sum(0 if tensor is None else tensor.nbytes for tensor in (self.whole, self.sent))


def gather_weights(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]],
    group: Group | None,
    *,
    dtype: torch.dtype | None,
    parts: Parts | None = None,
) -> Iterator[NamedTensor]:
    """Yield each tensor whole on the first rank of ``group``; on the others, send the shards and yield nothing.

    Floating-point tensors travel as ``dtype``, None: as they are. All ranks of the group must exhaust this iterator.
    Shards travel to that rank only, up to 512 MiB ahead of the yielded tensor, while the caller works with it.
    Replicated tensors cost no traffic. ``parts`` divides a whole tensor (or one on the meta device) into the named
    tensors to yield, as views.

    While weights are read for several senders (:class:`~hwrl.weights.SharedReads`), a tensor is gathered to the ranks
    that send a slab with a part of it, and yielded there. A tensor of an unknown name is gathered to all of them.
    """
    ahead: collections.deque[_Gathering] = collections.deque()
    limit = 0 if group is None else AHEAD_NBYTES  # one rank has no traffic to hide
    under_way = 0
    for name, tensor in named:
        ahead.append(_gather(name, tensor, group, dtype, to=_ranks_for(name, tensor.shape, parts)))
        under_way += ahead[-1].nbytes
        while under_way > limit:
            under_way -= ahead[0].nbytes
            yield from _finish(ahead.popleft(), parts)
    while ahead:
        yield from _finish(ahead.popleft(), parts)


def _ranks_for(name: str, shape: Sequence[int], parts: Parts | None) -> Sequence[int]:
    gatherers = _gatherers.get()
    return (0,) if gatherers is None else gatherers.ranks_for(name, shape, parts)


def _finish(one: _Gathering, parts: Parts | None) -> Iterator[NamedTensor]:
    for pending in one.pending:
        pending.wait()
    for part, buffer in one.part_buffers:
        if buffer is not part:
            part.copy_(buffer)
    if one.whole is not None:
        yield from [(one.name, one.whole)] if parts is None else parts(one.name, one.whole)


def _gather(
    name: str, tensor: torch.Tensor | WeightShard, group: Group | None, dtype: torch.dtype | None, *, to: Sequence[int]
) -> _Gathering:
    if group is not None and isinstance(tensor, DTensor):
        if tensor.placements == (Shard(0),) and tensor.device_mesh.size() == group.size:
            tensor = WeightShard(tensor.to_local(), tuple(tensor.shape), 0, group.size)
        else:
            tensor = tensor.full_tensor()
    local = tensor.tensor if isinstance(tensor, WeightShard) else tensor
    wanted = dtype if dtype is not None and local.is_floating_point() else local.dtype
    if not isinstance(tensor, WeightShard):
        return _Gathering(name, tensor.to(wanted) if group is None or group.rank in to else None)
    assert group is not None, "shards are of several ranks"
    mine = local.to(wanted).contiguous()  # empty if other ranks have the shards
    whole, buffers = None, list[tuple[torch.Tensor, torch.Tensor]]()
    pending: list[Pending] = []
    for rank in to:  # every rank in the same order: a library may run its operations one after the other
        if rank == group.rank:
            whole, buffers, received = _receive_shards(tensor, mine, group)
            pending += received
        elif mine.numel():
            pending.append(group.send(mine, dst=rank, async_op=True))
    return _Gathering(name, whole, buffers, pending, None if whole is not None and len(to) == 1 else mine)


def _receive_shards(
    shard: WeightShard, mine: torch.Tensor, group: Group
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[Pending]]:
    """Begin to receive the shards of the other ranks; return the whole tensor, its parts' buffers, the operations."""
    whole = torch.empty(shard.shape, dtype=mine.dtype, device=mine.device)
    parts = whole.split(-(-shard.shape[shard.dim] // shard.ranks), shard.dim)
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    pending = []
    for rank, part in zip(shard.holders, parts, strict=False):  # small tensors have fewer parts
        if rank == group.rank:
            part.copy_(mine)
        elif part.numel():
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=_DENSE)
            pending.append(group.recv(buffer, src=rank, async_op=True))
            buffers.append((part, buffer))
    return whole, buffers, pending
