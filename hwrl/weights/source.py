"""The weights to send, :class:`WeightSource`, and :func:`gather_weights`, which makes whole tensors out of shards."""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.errors import WeightsError
from hwrl.weights.layout import JOINT_READ, NamedTensor

AHEAD_NBYTES = 512 << 20
_log = logging.getLogger("hwrl.weights")
_DENSE = torch.contiguous_format
_HOLDS_TENSORS: tuple[type, ...] = (list, tuple, type({}.items()))
"""Collections that keep their items alive. Others may make items while they are read."""


@dataclass(frozen=True)
class WeightSource:
    """Named tensors that a transfer can read as often as it needs.

    ``metadata`` returns an iterator of names and tensors with the right dtypes and shapes. Meta tensors are enough, but
    only real ones show that they are contiguous in one storage. Two names of the same meta tensor object mean tied
    weights. ``read`` returns an iterator of the tensors themselves, in the same order.

    ``holds_tensors`` says that all tensors stay alive between two reads; otherwise they are made during a read.
    ``one_shot`` says that ``read`` works only once. A transfer that breaks then fails instead of being repeated.
    """

    metadata: Callable[[], Iterator[NamedTensor]]
    read: Callable[[], Iterator[NamedTensor]]
    holds_tensors: bool = False
    one_shot: bool = False

    def __post_init__(self) -> None:
        for name in ("metadata", "read"):
            if not callable(getattr(self, name)):
                raise WeightsError(
                    f"a WeightSource needs a function as {name}",
                    why=f"it is a {type(getattr(self, name)).__name__}; each call must return a new iterator",
                    fix="pass functions, or give publish() the module, the mapping or the pairs themselves",
                )

    @classmethod
    def of(cls, weights: Weights, *, group: Group | None = None) -> WeightSource:
        """Return ``weights`` as a source: a module, a mapping of names to tensors, or an iterable of pairs.

        With ``group`` its ranks read together, as in :meth:`from_module`.

        An iterator is read here to its end and all its tensors are held, because it can be read only once. Pass it to
        :meth:`~hwrl.weights.WeightSender.publish` directly to hold only some of them. Any other iterable is read again
        for each attempt.
        """
        if isinstance(weights, WeightSource):
            return weights
        if isinstance(weights, torch.nn.Module):
            return cls.from_module(weights, group=group)
        if isinstance(weights, Mapping):
            weights = weights.items()
        if not isinstance(weights, Iterable) or isinstance(weights, torch.Tensor | str | bytes):
            raise WeightsError(
                f"a {type(weights).__name__} cannot be sent as weights",
                why="it has no names with tensors",
                fix="give a module, a mapping of names to tensors, pairs of these, or a WeightSource",
            )
        named = list(weights) if isinstance(weights, Iterator) else weights
        if group is not None:
            return cls(lambda: _described(named), lambda: gather_weights(named, group, dtype=None))
        return cls(lambda: iter(named), lambda: iter(named), isinstance(named, _HOLDS_TENSORS))

    @classmethod
    def of_known_layout(cls, read: Callable[[], Iterator[NamedTensor]], *, one_shot: bool = False) -> WeightSource:
        """Return a source without metadata, for a transfer that knows the layout already."""
        return cls(lambda: iter(()), read, one_shot=one_shot)

    @classmethod
    def from_module(
        cls, module: torch.nn.Module, *, group: Group | None = None, dtype: torch.dtype | None = None
    ) -> WeightSource:
        """Return the parameters and persistent buffers of ``module``, under the names of its ``state_dict``.

        ``group`` has the ranks that share the module, sharded by FSDP2 or replicated; None means this rank alone. Rank
        0 reads whole tensors. The other ranks must iterate over the source as often; they send their shards and yield
        nothing. (:class:`~hwrl.weights.WeightSender` keeps the ranks of its ``group`` in step.) Names of tied tensors
        come last. ``dtype`` casts floating-point tensors. Raises WeightsError if the module is sharded and
        ``group`` is missing.

        Only a DTensor sharded along dimension 0 over the whole group travels point to point, to the ranks that need it.
        Any other DTensor (HSDP, tensor parallel) is gathered by ``full_tensor()`` on every rank.
        """
        weights = _ModuleWeights(module, group, dtype)
        return cls(weights.metadata, weights.read, holds_tensors=group is None and dtype is None)

    def __iter__(self) -> Iterator[NamedTensor]:
        return self.read()


Weights = WeightSource | torch.nn.Module | Mapping[str, torch.Tensor] | Iterable[NamedTensor]
"""What ``publish`` takes."""


class _ModuleWeights:
    def __init__(self, module: torch.nn.Module, group: Group | None, dtype: torch.dtype | None) -> None:
        self._module, self._group, self._dtype = module, group, dtype
        if group is None:
            self._tensors()  # raises at once if the module is sharded

    def metadata(self) -> Iterator[NamedTensor]:
        """Yield tensors that are sent unchanged, so that a flat storage is recognized; meta tensors for others."""
        tensors, tied_to = self._tensors()
        described = {}
        for name, tensor in tensors.items():
            dtype = self._dtype if self._dtype is not None and tensor.is_floating_point() else tensor.dtype
            if isinstance(tensor, DTensor) or self._dtype not in (None, tensor.dtype):
                tensor = torch.empty(tensor.shape, dtype=dtype, device="meta")
            described[name] = tensor
            yield name, tensor
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
        """Return each tensor under its first name, and the first name for each further name.

        All ranks must find the same ties. So this compares tensor objects, because an empty shard has no address.
        """
        names: dict[int, str] = {}
        tensors, tied_to = {}, {}
        for name, tensor in self._module.state_dict(keep_vars=True).items():
            if not isinstance(tensor, torch.Tensor):
                continue  # extra state of a module
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
                fix=JOINT_READ,
            )
        return tensor.to_local()


def drain(weights: Iterator[object]) -> None:
    """Read ``weights`` to their end and drop them. An error is logged, not raised.

    Making the tensors may be a collective operation, and other ranks would wait forever for one that stops early.
    """
    try:
        with torch.no_grad():
            for _ in weights:
                pass
    except Exception:  # noqa: BLE001 - the caller raises the first error, which says more
        _log.warning("the weights could not be read to their end", exc_info=True)


def _described(named: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """Yield tensors that are sent unchanged, so that a flat storage is recognized; meta tensors for others."""
    for name, tensor in named:
        is_shard = isinstance(tensor, DTensor | WeightShard)
        yield name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if is_shard else tensor


# -- whole tensors out of shards -------------------------------------------------------------------------------------

Parts = Callable[[str, torch.Tensor], Iterator[NamedTensor]]
"""Divides a tensor into named tensors, which are views of it: the parts of a fused parameter, for example."""


class Gatherers:
    """The ranks that need each tensor whole, in rank order: ``of_tensor`` by name, and ``ranks`` for unknown names."""

    def __init__(self, ranks: Sequence[int], of_tensor: Mapping[str, Sequence[int]]) -> None:
        self._ranks, self._of_tensor = ranks, of_tensor
        self._of_divided: dict[str, Sequence[int]] = {}

    def ranks_for(self, name: str, shape: Sequence[int], parts: Parts | None) -> Sequence[int]:
        """Return the ranks that need tensor ``name`` or one of its ``parts``."""
        known = self._of_tensor.get(name)
        if known is not None or parts is None:
            return self._ranks if known is None else known
        if name not in self._of_divided:
            names = [part for part, _ in parts(name, torch.empty(*shape, device="meta"))]
            self._of_divided[name] = sorted({rank for part in names for rank in self._of_tensor.get(part, self._ranks)})
        return self._of_divided[name]


_gatherers: ContextVar[Gatherers | None] = ContextVar("gatherers", default=None)


def gathered(source: WeightSource, gatherers: Gatherers | None) -> Iterator[NamedTensor]:
    """Yield this rank's tensors of ``source``. All ranks must read this to its end together.

    Meanwhile :func:`gather_weights` gathers to the ranks of ``gatherers``; None means to rank 0. It does not get them
    as an argument, because a train engine makes the call.
    """
    weights = iter(source)
    while True:
        token = _gatherers.set(gatherers)  # only around next: a yield would set it for the caller, too
        try:
            pair = next(weights, None)
        finally:
            _gatherers.reset(token)
        if pair is None:
            return
        yield pair


@dataclass(frozen=True)
class WeightShard:
    """This rank's shard of a tensor of ``shape``, divided along ``dim`` over the first ``ranks`` ranks of a group.

    Shards are of equal size, rounded up, so the last ones may be smaller or empty. ``owners`` lists the ranks that have
    the shards, in order, if they are not the first ones. A rank without a shard has an empty ``tensor`` of the right
    dtype and device.
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
    """A tensor that is being gathered. On a rank that needs it, ``whole`` is the tensor.

    Each shard is received into a buffer: its slice of ``whole`` if that is contiguous, else a temporary. ``sent`` keeps
    this rank's shard alive while it is sent to other ranks.
    """

    name: str
    whole: torch.Tensor | None = None
    shard_buffers: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    pending: Sequence[Pending] = ()
    sent: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """The bytes that this rank holds for it, without temporary buffers."""
        return sum(0 if tensor is None else tensor.nbytes for tensor in (self.whole, self.sent))


def gather_weights(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]],
    group: Group | None,
    *,
    dtype: torch.dtype | None,
    parts: Parts | None = None,
) -> Iterator[NamedTensor]:
    """Yield each tensor whole on rank 0 of ``group``. The other ranks send their shards and yield nothing.

    Floating-point tensors are cast to ``dtype`` first, unless it is None. All ranks of the group must read this
    iterator to its end. Shards are sent to rank 0 only, up to 512 MiB ahead of the yielded tensor, while the caller
    works with it. Replicated tensors are not sent. ``parts`` divides a whole tensor (or one on the meta device) into
    the named tensors to yield, which are views.

    While several ranks send a version, a tensor is gathered to each rank that sends a
    slab with bytes of it, and yielded there. A tensor of an unknown name is gathered to all senders.
    """
    ahead: collections.deque[_Gathering] = collections.deque()
    limit = 0 if group is None else AHEAD_NBYTES  # a single rank has no traffic to overlap
    under_way = 0
    try:
        for name, tensor in named:
            gatherers = _gatherers.get()
            to = (0,) if gatherers is None else gatherers.ranks_for(name, tensor.shape, parts)
            ahead.append(_gather(name, tensor, group, dtype, to=to))
            under_way += ahead[-1].nbytes
            while under_way > limit:
                under_way -= ahead[0].nbytes
                yield from _finish(ahead.popleft(), parts)
    except Exception:
        if isinstance(named, Iterator):  # the ranks may make the rest together
            drain(named)
        raise
    while ahead:
        yield from _finish(ahead.popleft(), parts)


def _finish(one: _Gathering, parts: Parts | None) -> Iterator[NamedTensor]:
    for pending in one.pending:
        pending.wait()
    for part, buffer in one.shard_buffers:
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
    assert group is not None, "a shard needs a group"
    mine = local.to(wanted).contiguous()  # empty if only other ranks have shards
    whole, buffers = None, list[tuple[torch.Tensor, torch.Tensor]]()
    pending: list[Pending] = []
    for rank in to:  # in the same order on every rank: a library may run its operations one after another
        if rank == group.rank:
            whole, buffers, received = _receive_shards(tensor, mine, group)
            pending += received
        elif mine.numel():
            pending.append(group.send(mine, dst=rank, async_op=True))
    return _Gathering(name, whole, buffers, pending, None if whole is not None and len(to) == 1 else mine)


def _receive_shards(
    shard: WeightShard, mine: torch.Tensor, group: Group
) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], list[Pending]]:
    """Begin to receive the other ranks' shards; return the tensor, pairs of slice and buffer, and the operations."""
    whole = torch.empty(shard.shape, dtype=mine.dtype, device=mine.device)
    slices = whole.split(-(-shard.shape[shard.dim] // shard.ranks), shard.dim)
    buffers: list[tuple[torch.Tensor, torch.Tensor]] = []
    pending = []
    for rank, part in zip(shard.holders, slices, strict=False):  # a small tensor has fewer slices than ranks
        if rank == group.rank:
            part.copy_(mine)
        elif part.numel():
            buffer = part if part.is_contiguous() else torch.empty_like(part, memory_format=_DENSE)
            pending.append(group.recv(buffer, src=rank, async_op=True))
            buffers.append((part, buffer))
    return whole, buffers, pending
