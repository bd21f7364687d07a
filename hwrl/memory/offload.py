"""Device memory that is given back and restored: :class:`Offloader`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from hwrl.backend import Backend
from hwrl.errors import MemoryStateError
from hwrl.memory.fingerprint import bytes_of, fingerprints
from hwrl.memory.lending import HostCopies, HostCopy, Loans
from hwrl.memory.pool import PinnedPool
from hwrl.memory.slabs import batches
from hwrl.registry import get_backend

_ALIGNMENT_NBYTES = 512
_BATCH_NBYTES = 256 << 20  # copying it takes several times as long as the fingerprints of the next batch

_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source."""
_Placed = tuple[torch.UntypedStorage, int, tuple[int, ...]]
"""A storage, where its copy begins in the slab, and its tensors' version counters."""


class Transfer:
    """What an offload or a load moved. ``nbytes`` counts the bytes that were copied, not those only freed."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._events: list[tuple[Any, Any]] = []

    def add(self, *, nbytes: int, begin: Any, end: Any) -> None:
        """Count a copy of ``nbytes`` between two timing events."""
        self.nbytes += nbytes
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """The duration of the copies; exactly 0.0 if nothing was copied. Blocks until they are done."""
        for _, end in self._events:
            end.synchronize()
        return sum((float(begin.elapsed_time(end)) for begin, end in self._events), 0.0) / 1000

    def __repr__(self) -> str:
        return f"Transfer(nbytes={self.nbytes}, seconds={self.seconds:.6f})"


@dataclass
class Moved:
    """What :meth:`Offloader.loaded` moved: ``load`` on entering, ``offload`` on leaving (nothing until then)."""

    load: Transfer = field(default_factory=Transfer)
    offload: Transfer = field(default_factory=Transfer)


class Offloader:
    """Moves a model's parameters and buffers, and its optimizer's state, to the host and back.

    What an optimizer updates that is none of the model's memory, such as its own float32 parameters, is its state too.
    Works on plain modules and on FSDP2 (each rank moves its own shards), with tied parameters and shared storages
    moved once. Device memory is really freed, and comes back under the same Parameter objects and storages, so that
    the optimizer, FSDP2 and views stay valid. Gradients are left alone: call ``zero_grad`` first.

    A storage is not copied to the host again if the host still has its content: its tensors' version counters and
    a fingerprint of its bytes, taken on the device, are both unchanged. (Counters alone do not tell: fused
    optimizers and ``foreach`` operations on DTensors do not count.)

    While parts are offloaded, ``forward``, ``step``, ``state_dict`` and ``load_state_dict`` raise
    :class:`~hwrl.errors.MemoryStateError`; reading a tensor directly is not guarded and may crash the process.

    The offloader owns the host memory; ``close``, or leaving the context, brings everything back and frees it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None, *, backend: Backend | None = None) -> None:
        self._backend = backend or get_backend()
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._lending = threading.Event()
        refusals = functools.partial(_refuse_use, model, optimizer, self._lending)
        find_params = functools.partial(_model_tensors, model)
        find_state = functools.partial(_optimizer_tensors, optimizer)
        self._params = _Part("parameters", self._backend, find_params, refusals)
        self._optimizer = _Part("optimizer", self._backend, find_state, refusals, apart_from=find_params)

    @property
    def pool_nbytes(self) -> int:
        """The bytes of host memory that are held for copies."""
        return self._pool.nbytes

    def offload(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Move the chosen parts to the host and free their device memory; what is offloaded already stays so.

        Blocks until the copies are complete, and before that, batch by batch, until what is to be overwritten is no
        longer lent. Raises :class:`~hwrl.errors.MemoryStateError`, with nothing changed, if
        a tensor's memory cannot be given back.
        """
        parts = [part for part in self._chosen(params=params, optimizer=optimizer) if not part.offloaded]
        self._stream.synchronize()  # a load may still read the slab that is now written
        moved = Transfer()
        for plan in [part.plan_offload(self._pool) for part in parts]:
            for copies in plan:
                self._copy(copies, moved)
        self._stream.synchronize()
        for part in parts:
            part.free()
        if parts:
            self._backend.empty_cache()
        return moved

    def load(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Bring the chosen parts back; what is on the device already stays so.

        Does not block where the backend has streams: the caller's current stream waits for the copies. Raises
        :class:`~hwrl.errors.MemoryStateError` if the device has no room; that part stays offloaded then.
        """
        parts = [part for part in self._chosen(params=params, optimizer=optimizer) if part.offloaded]
        moved = Transfer()
        try:
            for part in parts:
                for copies in part.restore():
                    self._copy(copies, moved)
        finally:
            self._backend.current_stream().wait_stream(self._stream)
        return moved

    @contextlib.contextmanager
    def loaded(self, *, params: bool = True, optimizer: bool = True) -> Iterator[Moved]:
        """Have the chosen parts on the device inside; restore the state that was found, on errors too."""
        chosen = self._chosen(params=params, optimizer=optimizer)
        found = [part.offloaded for part in chosen]
        moved = Moved()
        try:
            moved.load = self.load(params=params, optimizer=optimizer)
            yield moved
        finally:
            away = [part for part, offloaded in zip(chosen, found, strict=True) if offloaded]
            here = [part for part in chosen if part not in away]
            moved.offload = self.offload(params=self._params in away, optimizer=self._optimizer in away)
            self.load(params=self._params in here, optimizer=self._optimizer in here)

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Let ``state_dict`` of offloaded parts work inside: its tensors have no memory, :meth:`lend` has their values.

        So what is offloaded is saved from the host, without a load and without a copy:
        ``with offloader.lending(): manager.save(step, state_of(model, optimizer), offloader=offloader)``.
        """
        self._lending.set()
        try:
            yield
        finally:
            self._lending.clear()

    def lend(self, tensor: torch.Tensor) -> HostCopy | None:
        """Lend the host's copy of an offloaded tensor (of a DTensor: of its local part); None if it is not offloaded.

        The copy is good until it is given back, however often the parts are loaded and offloaded in the meantime.
        """
        copies = self.lend_all()
        try:
            return copies.lend(_local(tensor))
        finally:
            copies.give_back()

    def lend_all(self) -> HostCopies:
        """Lend all that is offloaded, at once; the parts that are not are none of it."""
        return HostCopies([part.lendable for part in (self._params, self._optimizer) if part.lendable is not None])

    def close(self) -> None:
        """Bring everything back and free the host memory, what is lent when it is given back. May be called again."""
        self.load()
        self._stream.synchronize()
        for part in (self._params, self._optimizer):
            part.forget()
        self._pool.close()

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _chosen(self, *, params: bool, optimizer: bool) -> list[_Part]:
        return [self._params] * params + [self._optimizer] * optimizer

    def _copy(self, copies: _Copies, moved: Transfer) -> None:
        """Queue ``copies`` on the side stream, after the current one's work, and count them in ``moved``."""
        if not copies:
            return
        begin, end = self._backend.event(timing=True), self._backend.event(timing=True)
        self._stream.wait_stream(self._backend.current_stream())
        with self._stream:
            begin.record(self._stream)
            for target, source in copies:
                target.copy_(source, non_blocking=True)
            end.record(self._stream)
        moved.add(nbytes=sum(target.numel() for target, _ in copies), begin=begin, end=end)


@dataclass(frozen=True)
class _Slot:
    """Where a storage's copy lies in the slab, and by what it would show that it changed since."""

    start: int
    nbytes: int
    versions: tuple[int, ...]
    fingerprint: int


class _Part:
    """The storages of one kind, and their copies in one slab."""

    def __init__(
        self,
        name: str,
        backend: Backend,
        find: Callable[[], Iterable[torch.Tensor]],
        refuse: Callable[[str], list[Any]],
        *,
        apart_from: Callable[[], Iterable[torch.Tensor]] = tuple,
    ) -> None:
        self._name, self._backend = name, backend
        self._find, self._apart_from, self._refuse = find, apart_from, refuse
        self._slab: torch.Tensor | None = None
        self._copied: dict[int, _Slot] = {}  # by start, what the slab holds
        self._away: list[tuple[torch.UntypedStorage, _Slot]] = []  # of an offloaded part; else to be freed
        self._starts: dict[int, int] = {}  # by storage, of an offloaded part
        self._loans = Loans()
        self._guards: list[Any] = []
        self.offloaded = False

    def plan_offload(self, pool: PinnedPool) -> Iterator[_Copies]:
        """Return the copies to the host that :meth:`free` needs first, in batches; changes nothing on the device.

        A batch is compared with what the host holds only when it is asked for, while the one before is copied.
        """
        layout = self._lay_out()
        slab = pool.slab(self._name, nbytes=max((start + storage.nbytes() for storage, start, _ in layout), default=0))
        if slab is not self._slab:
            self._slab, self._copied = slab, {}
        known, self._copied, self._away = self._copied, {}, []  # known again when the copies are complete
        return self._stale(layout, slab, known)

    def _stale(self, layout: list[_Placed], slab: torch.Tensor, known: dict[int, _Slot]) -> Iterator[_Copies]:
        for batch in batches(layout, lambda placed: placed[0].nbytes(), nbytes=_BATCH_NBYTES):
            copies = []
            prints = fingerprints([storage for storage, _, _ in batch])
            for (storage, start, versions), fingerprint in zip(batch, prints, strict=True):
                slot = _Slot(start, storage.nbytes(), versions, fingerprint)
                self._away.append((storage, slot))
                if known.get(start) != slot:
                    self._loans.wait(start)
                    copies.append((slab[start : start + slot.nbytes], bytes_of(storage)))
            yield copies

    def free(self) -> None:
        """Free the device memory; the slab holds all of it."""
        self._copied = {slot.start: slot for _, slot in self._away}
        self._starts = {storage._cdata: slot.start for storage, slot in self._away}
        for storage, _ in self._away:
            storage.resize_(0)
        self._guards = self._refuse(self._name)
        self.offloaded = True

    def restore(self) -> Iterator[_Copies]:
        """Allocate the device memory again, batch by batch, and yield the copies that fill it.

        A batch is allocated while the one before is copied.
        """
        assert self._slab is not None, "offloaded before"
        for batch in batches(self._away, lambda pair: pair[1].nbytes, nbytes=_BATCH_NBYTES):
            self._allocate(batch)
            yield [(bytes_of(storage), self._slab[slot.start : slot.start + slot.nbytes]) for storage, slot in batch]
        for guard in self._guards:
            guard.remove()
        self._away, self._starts, self._guards, self.offloaded = [], {}, [], False

    def forget(self) -> None:
        """Let go of the host's copies, of a part that is on the device."""
        self._slab, self._copied = None, {}

    @property
    def lendable(self) -> tuple[torch.Tensor, Mapping[int, int], Loans] | None:
        """Where the copies lie while offloaded, by storage, and who reads them; else None."""
        return None if self._slab is None or not self.offloaded else (self._slab, self._starts, self._loans)

    def _allocate(self, batch: list[tuple[torch.UntypedStorage, _Slot]]) -> None:
        try:
            for storage, slot in batch:
                storage.resize_(slot.nbytes)
        except RuntimeError as exc:  # torch's out-of-memory errors
            self._backend.synchronize()  # earlier batches are being copied
            for storage, _ in self._away:
                storage.resize_(0)
            raise MemoryStateError(
                f"the {self._name} cannot be loaded", why=str(exc), fix="free device memory and load again"
            ) from exc

    def _lay_out(self) -> list[_Placed]:
        apart = {storage._cdata for storage, _ in self._storages(self._apart_from())}
        placed: list[_Placed] = []
        start = 0
        for storage, versions in self._storages(self._find()):
            if storage._cdata not in apart:
                _require_resizable(storage, self._name)
                placed.append((storage, start, versions))
                start += -(-storage.nbytes() // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
        return placed

    def _storages(self, tensors: Iterable[torch.Tensor]) -> list[tuple[torch.UntypedStorage, tuple[int, ...]]]:
        """Return each storage on the device once, with the versions of all tensors that share it."""
        storages: dict[int, torch.UntypedStorage] = {}
        versions: dict[int, tuple[int, ...]] = {}
        for tensor in tensors:
            local = _local(tensor)
            storage = local.untyped_storage()
            if local.device.type == self._backend.info.device_type and storage.nbytes():
                storages[storage._cdata] = storage
                versions[storage._cdata] = (*versions.get(storage._cdata, ()), tensor._version, local._version)
        return [(storage, versions[key]) for key, storage in storages.items()]


def _model_tensors(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a root that only ran forward still holds its whole parameters
    yield from model.parameters()
    yield from model.buffers()


def _optimizer_tensors(optimizer: Optimizer | None) -> Iterator[torch.Tensor]:
    if optimizer is not None:
        yield from _tensors_in(list(optimizer.state.values()))
        for group in optimizer.param_groups:  # copies of its own, in float32; the model's parameters are set apart
            yield from group["params"]


def _tensors_in(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors_in(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors_in(one)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def _require_resizable(storage: torch.UntypedStorage, name: str) -> None:
    if not storage.resizable():
        raise MemoryStateError(
            f"the {name} cannot be offloaded",
            why=f"{storage.nbytes():,} bytes of them belong to a file, an array or another process",
            fix="give the tensors memory of their own: parameter.data = parameter.data.clone()",
        )


def _refuse_use(model: nn.Module, optimizer: Optimizer | None, lending: threading.Event, name: str) -> list[Any]:
    """Make every use of an offloaded part raise, except ``state_dict`` during ``lending``; return the handles."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise MemoryStateError(
            f"the {name} cannot be used", why="they are offloaded", fix="use them inside `with offloader.loaded():`"
        )

    def refuse_state(*args: object, **kwargs: object) -> None:
        if not lending.is_set():
            refuse()

    guards: list[Any] = []
    modules: Iterable[Any] = model.modules() if name == "parameters" else ()
    if optimizer is not None:
        guards.append(optimizer.register_step_pre_hook(refuse))
    if optimizer is not None and name == "optimizer":
        guards.append(optimizer.register_state_dict_pre_hook(refuse_state))
        guards.append(optimizer.register_load_state_dict_pre_hook(refuse))
    for module in modules:
        guards.append(module.register_state_dict_pre_hook(refuse_state))
        guards += [
            module.register_forward_pre_hook(refuse, prepend=True),
            module.register_load_state_dict_pre_hook(refuse),
        ]
    return guards
