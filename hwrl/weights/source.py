"""The weights to send, :class:`WeightSource`, and :func:`gather_weights`, which makes whole tensors out of shards."""

from __future__ import annotations

import collections
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import DTensor, Shard

from hwrl.comm import Group, Pending
from hwrl.errors import WeightsError
from hwrl.weights.layout import NamedTensor, checked_pair

AHEAD_NBYTES = 512 << 20
"""The most bytes of tensors that :func:`gather_weights` gathers ahead, beside the one that it yields."""
_PARCEL_NBYTES = 32 << 20  # a message of a few MB travels at the speed of the link
_log = logging.getLogger("hwrl.weights")
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
        described = dict(_described(tensors.items(), self._dtype))
        yield from described.items()
        yield from ((name, described[first]) for name, first in tied_to.items())

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
            own = tensor.detach()
            tensors[name] = own if self._group is not None else checked_pair((name, own))[1]
        return tensors, tied_to


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


def _described(named: Iterable[NamedTensor], dtype: torch.dtype | None = None) -> Iterator[NamedTensor]:
    """Yield tensors that are sent unchanged, so that a flat storage is recognized; meta tensors for others."""
    for name, tensor in named:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        is_made = isinstance(tensor, DTensor) or tensor.dtype is not wanted
        yield name, torch.empty(tensor.shape, dtype=wanted, device="meta") if is_made else tensor


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
    """This rank's shard of a tensor of ``shape``, divided along ``dim`` over the ranks ``holders``, in order.

    Shards are of equal size, rounded up, so the last ones may be smaller or empty. A rank without a shard has an empty
    ``tensor`` of the right dtype and device.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    dim: int
    holders: Sequence[int]


@dataclass
class _Parcel:
    """Tensors that follow one another and are gathered together, to the ranks ``to``: one message from each holder.

    ``shards`` are this rank's. A tensor of which every rank has the whole is alone in its parcel, as ``wholes``.
    """

    key: object
    to: Sequence[int]
    dtype: torch.dtype
    names: list[str] = field(default_factory=list)
    shards: list[WeightShard] = field(default_factory=list)
    wholes: list[torch.Tensor] = field(default_factory=list)
    nbytes: int = 0
    pending: list[Pending] = field(default_factory=list)
    received: list[tuple[torch.Tensor, list[torch.Tensor]]] = field(default_factory=list)
    """Each buffer of a message, with the slices of ``wholes`` that are in it."""
    sent: torch.Tensor | None = None
    """The message of this rank; kept alive until the other ranks have it."""


def gather_weights(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]],
    group: Group | None,
    *,
    dtype: torch.dtype | None,
    parts: Parts | None = None,
) -> Iterator[NamedTensor]:
    """Yield each tensor whole on rank 0 of ``group``. The other ranks send their shards and yield nothing.

    Floating-point tensors are cast to ``dtype`` first, unless it is None. All ranks of the group must read this
    iterator to its end. Shards are sent to rank 0 only, those of small tensors together, up to 512 MiB ahead of the
    yielded tensor, while the caller works with it. Replicated tensors are not sent. ``parts`` divides a whole tensor
    (or one on the meta device) into the named tensors to yield, which are views.

    While several ranks send a version, a tensor is gathered to each rank that sends a bucket with bytes of it, and
    yielded there. A tensor of an unknown name is gathered to all senders.
    """
    ahead: collections.deque[_Parcel] = collections.deque()
    limit = 0 if group is None else AHEAD_NBYTES  # a single rank has no traffic to overlap
    under_way = 0
    try:
        for parcel in _parcels(named, group, dtype, parts):
            _begin(parcel, group)
            ahead.append(parcel)
            under_way += parcel.nbytes
            while under_way > limit:
                under_way -= ahead[0].nbytes
                yield from _finish(ahead.popleft(), parts)
    except Exception:
        if isinstance(named, Iterator):  # the ranks may make the rest together
            drain(named)
        raise
    while ahead:
        yield from _finish(ahead.popleft(), parts)


def _parcels(
    named: Iterable[tuple[str, torch.Tensor | WeightShard]],
    group: Group | None,
    dtype: torch.dtype | None,
    parts: Parts | None,
) -> Iterator[_Parcel]:
    """Yield all tensors in parcels, the same on every rank. A tensor that is larger than a parcel has its own."""
    parcel: _Parcel | None = None
    for name, tensor in named:
        gatherers = _gatherers.get()
        to = (0,) if gatherers is None else gatherers.ranks_for(name, tensor.shape, parts)
        if group is not None and isinstance(tensor, DTensor):
            if tensor.placements == (Shard(0),) and tensor.device_mesh.size() == group.size:
                tensor = WeightShard(tensor.to_local(), tuple(tensor.shape), 0, range(group.size))
            else:
                tensor = tensor.full_tensor()
        local = tensor.tensor if isinstance(tensor, WeightShard) else tensor
        wanted = dtype if dtype is not None and local.is_floating_point() else local.dtype
        nbytes = math.prod(tensor.shape) * wanted.itemsize
        key = (to, wanted, tensor.holders) if isinstance(tensor, WeightShard) else None
        if parcel is not None and (parcel.key != key or parcel.nbytes + nbytes > _PARCEL_NBYTES):
            yield parcel
            parcel = None
        if isinstance(tensor, WeightShard):
            if group is None:
                raise WeightsError(
                    f"tensor {name!r} cannot be gathered",
                    why="it is a shard, and there is no group with the ranks that have the others",
                    fix="pass the group of the ranks",
                )
            parcel = parcel or _Parcel(key, to, wanted)
            parcel.names.append(name)
            parcel.shards.append(tensor)
            parcel.nbytes += nbytes
        else:
            wholes = [tensor.to(wanted)] if group is None or group.rank in to else []
            yield _Parcel(key, to, wanted, [name], wholes=wholes, nbytes=nbytes)
    if parcel is not None:
        yield parcel


def _begin(parcel: _Parcel, group: Group | None) -> None:
    """Begin to send this rank's shards, and to receive the others' where the tensors are needed."""
    shards = [shard.tensor for shard in parcel.shards if shard.tensor.numel()]
    if group is None or not parcel.shards:
        return
    if shards and any(rank != group.rank for rank in parcel.to):
        parcel.sent = _packed(shards, parcel.dtype)
    for rank in parcel.to:  # in the same order on every rank: a library may run its operations one after another
        if rank != group.rank:
            if parcel.sent is not None:
                parcel.pending.append(group.send(parcel.sent, dst=rank, async_op=True))
            continue
        device = parcel.shards[0].tensor.device
        parcel.wholes = [torch.empty(shard.shape, dtype=parcel.dtype, device=device) for shard in parcel.shards]
        slices = [
            whole.split(-(-shard.shape[shard.dim] // len(shard.holders)), shard.dim)
            for whole, shard in zip(parcel.wholes, parcel.shards, strict=True)
        ]
        for number, holder in enumerate(parcel.shards[0].holders):
            # A small tensor has fewer slices than there are ranks.
            theirs = [one[number] for one in slices if number < len(one) and one[number].numel()]
            if holder == group.rank and theirs:
                torch._foreach_copy_(theirs, shards)
            elif theirs:
                alone = len(theirs) == 1 and theirs[0].is_contiguous()
                size = sum(part.numel() for part in theirs)
                buffer = theirs[0] if alone else torch.empty(size, dtype=parcel.dtype, device=device)
                parcel.pending.append(group.recv(buffer, src=holder, async_op=True))
                parcel.received.append((buffer, theirs))


def _packed(shards: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of ``shards`` as ``dtype`` in one tensor."""
    if len(shards) == 1:
        return shards[0].to(dtype).contiguous()
    flat = torch.empty(sum(shard.numel() for shard in shards), dtype=dtype, device=shards[0].device)
    torch._foreach_copy_(_unpacked(flat, shards), list(shards))
    return flat


def _unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the parts of ``flat``, in the shapes of ``like``."""
    pieces = flat.split([one.numel() for one in like])
    return [piece.view(one.shape) for piece, one in zip(pieces, like, strict=True)]


def _finish(parcel: _Parcel, parts: Parts | None) -> Iterator[NamedTensor]:
    for pending in parcel.pending:
        pending.wait()
    for buffer, slices in parcel.received:
        if buffer is not slices[0]:
            torch._foreach_copy_(slices, _unpacked(buffer, slices))
    for name, whole in zip(parcel.names, parcel.wholes, strict=False):  # a rank that needs none has no wholes
        yield from [(name, whole)] if parts is None else parts(name, whole)
