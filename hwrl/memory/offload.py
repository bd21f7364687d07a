"""Device memory that is given back and restored: :class:`Offloader`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hwrl.discovery import backend_or_default
from hwrl.errors import HwrlError, MemoryStateError
from hwrl.interfaces import Backend, Moved, Transfer
from hwrl.memory.fingerprint import bytes_of, fingerprints
from hwrl.memory.guards import Guards, optimizers_in
from hwrl.memory.lending import HostCopies, HostCopy, Loans
from hwrl.memory.pool import PinnedPool
from hwrl.memory.slabs import batches
from hwrl.memory.storages import (
    Named,
    Placed,
    model_tensors,
    optimizer_tensors,
    pieces_of,
    require_resizing,
    storages_of,
    whole,
)

_ALIGNMENT_NBYTES = 512
_BATCH_NBYTES = 256 << 20  # copying it takes several times as long as the fingerprints of the next batch

_Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source."""


class Offloader:
    """Moves a model's parameters and buffers, and its optimizer's state, to the host and back.

    What an optimizer updates that is none of the model's memory, such as its own float32 parameters, is its state too.
    Works on plain modules and on FSDP2 (each rank moves its own shards), with tied parameters and shared storages
    moved once. ``optimizer`` is one of torch's, or a wrapper that holds some, as accelerate's does.
    Tensor subclasses move if they have ``__tensor_flatten__``, or memory of their own and more in their attributes.
    Device memory is really freed, and comes back under the same Parameter objects and storages, so that
    the optimizer, FSDP2 and views stay valid. Gradients are left alone: call ``zero_grad`` first.

    A storage is not copied to the host again if the host still has its content: its tensors' version counters and
    a fingerprint of its bytes, taken on the device, are both unchanged. (Counters alone do not tell: fused
    optimizers and ``foreach`` operations on DTensors do not count.)

    Nothing is freed before everything was found to be movable, the host has a copy, and the guards are on. An error
    at any point leaves everything as it was.

    While parts are offloaded, ``forward`` (compiled too), ``step``, ``state_dict`` and ``load_state_dict`` raise
    :class:`~hwrl.errors.MemoryStateError`; reading a tensor directly is not guarded and may crash the process.

    The offloader owns the host memory; ``close``, or leaving the context, brings everything back and frees it.
    """

    def __init__(self, model: nn.Module, optimizer: object = None, *, backend: Backend | None = None) -> None:
        self._backend = backend_or_default(backend)
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._lending = threading.Event()
        optimizers_in(optimizer)  # refuses a wrapper of none
        find_params = functools.partial(model_tensors, model)
        guards = Guards("parameters", model, optimizer, self._lending)
        self._params = _Part("parameters", self._backend, find_params, guards)
        guards = Guards("optimizer", model, optimizer, self._lending)
        find_state = functools.partial(_optimizer_tensors, optimizer)
        self._optimizer = _Part("optimizer", self._backend, find_state, guards, apart_from=find_params)

    @property
    def pool_nbytes(self) -> int:
        """The bytes of host memory that are held for copies."""
        return self._pool.nbytes

    def offload(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Move the chosen parts to the host and free their device memory; what is offloaded already stays so.

        Blocks until the copies are complete, and before that, batch by batch, until what is to be overwritten is no
        longer lent. Raises :class:`~hwrl.errors.MemoryStateError`, with everything as it was, if
        a tensor's memory cannot be moved, or on any other error.
        """
        parts = [part for part in self._chosen(params=params, optimizer=optimizer) if not part.offloaded]
        moved = Transfer()
        with _explained("offloaded", parts, fix="nothing was moved: remove the cause and offload again"):
            try:
                self._move_out(parts, moved)
            except BaseException:
                self._stay(parts)
                raise
        return moved

    def _move_out(self, parts: list[_Part], moved: Transfer) -> None:
        self._stream.synchronize()  # a load may still read the slab that is now written
        for part in parts:
            part.lay_out()
        for part in parts:
            for copies in part.save(self._pool):
                self._copy(copies, moved)
        self._stream.synchronize()
        for part in parts:
            part.guard()
        for part in parts:
            part.free()
        if parts:
            self._backend.empty_cache()

    def _stay(self, parts: list[_Part]) -> None:
        away = [part for part in parts if part.offloaded]
        for part in parts:
            if not part.offloaded:
                part.release()
                part.let_go()
        with _explained("brought back after an error", away, fix="the host has all of it: free device memory and load"):
            self._bring_back(away)
        for part in away:
            part.let_go()

    def load(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Bring the chosen parts back; what is on the device already stays so.

        Does not block where the backend has streams: the caller's current stream waits for the copies. Raises
        :class:`~hwrl.errors.MemoryStateError`, with everything as it was, if the device has no room, or on any other
        error: the host's copies are kept, for another load.
        """
        parts = [part for part in self._chosen(params=params, optimizer=optimizer) if part.offloaded]
        with _explained("loaded", parts, fix="the host still has all of it: free device memory and load again"):
            moved = self._bring_back(parts)
        for part in parts:
            part.let_go()
        return moved

    def _bring_back(self, parts: list[_Part]) -> Transfer:
        moved = Transfer()
        try:
            for part in parts:
                for copies in part.fill():
                    self._copy(copies, moved)
            self._backend.current_stream().wait_stream(self._stream)
            for part in parts:
                part.release()
        except BaseException:
            for part in parts:
                part.guard()
            self._stream.synchronize()  # copies may still write what is freed
            for part in parts:
                part.free()
            raise
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
            return copies.lend(whole(tensor, is_away=copies.holds))
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
    """The storages of one kind, and their copies in one slab.

    Out: ``lay_out``, ``save``, ``guard``, ``free``. Back: ``fill``, ``release``. After an error on the way out,
    ``fill`` if it was freed, and ``release``; on the way back, ``guard`` and ``free``. When it is back: ``let_go``.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        find: Callable[[], Named],
        guards: Guards,
        *,
        apart_from: Callable[[], Named] = tuple,
    ) -> None:
        self.name, self._backend = name, backend
        self._find, self._apart_from, self._guards = find, apart_from, guards
        self._slab: torch.Tensor | None = None
        self._copied: dict[int, _Slot] = {}  # by start, what the slab holds
        self._layout: list[Placed] = []
        self._away: list[tuple[torch.UntypedStorage, _Slot]] = []  # what is in the slab, in the order of the layout
        self._starts: dict[int, int] = {}  # by storage, of an offloaded part
        self._loans = Loans()
        self.offloaded = False

    def lay_out(self) -> None:
        """Find the storages; raises, by the tensor's name, if one cannot be moved. Changes nothing."""
        apart = {piece.storage_key for piece in pieces_of(self._apart_from())}
        pieces = [piece for piece in pieces_of(self._find()) if piece.storage_key not in apart]
        self._layout = storages_of(pieces, self.name, device_type=self._backend.info.device_type)
        if self._layout:
            require_resizing(self._layout[0].storage.device)

    def save(self, pool: PinnedPool) -> Iterator[_Copies]:
        """Yield the copies to the host that :meth:`free` needs first, in batches; changes nothing on the device.

        A batch is compared with what the host holds only when it is asked for, while the one before is copied.
        """
        starts = list(itertools.accumulate(map(_aligned_nbytes, self._layout), initial=0))
        slab = pool.slab(self.name, nbytes=starts[-1])
        if slab is not self._slab:
            self._slab, self._copied = slab, {}
        known, self._copied, self._away = self._copied, {}, []  # known again when the copies are complete
        placed = zip(self._layout, starts, strict=False)
        for batch in batches(placed, lambda one: one[0].storage.nbytes(), nbytes=_BATCH_NBYTES):
            copies = []
            prints = fingerprints([one.storage for one, _ in batch])
            for (one, start), fingerprint in zip(batch, prints, strict=True):
                slot = _Slot(start, one.storage.nbytes(), one.versions, fingerprint)
                self._away.append((one.storage, slot))
                if known.get(start) != slot:
                    self._loans.wait(start)
                    copies.append((slab[start : start + slot.nbytes], bytes_of(one.storage)))
            yield copies

    def guard(self) -> None:
        """Refuse every use from now on."""
        around = (piece.around for one in self._layout for piece in one.pieces)
        self._guards.install(around=next(filter(None, around), None))

    def free(self) -> None:
        """Free the device memory; the slab holds all of it, and no use is possible."""
        self._copied = {slot.start: slot for _, slot in self._away}
        self._starts = {storage._cdata: slot.start for storage, slot in self._away}
        self.offloaded = True
        for storage, _ in self._away:
            storage.resize_(0)

    def fill(self) -> Iterator[_Copies]:
        """Allocate the device memory again, batch by batch, and yield the copies that fill it.

        A batch is allocated while the one before is copied. After an error the memory that is still there is filled
        as well: nobody knows what it holds.
        """
        assert self._slab is not None, "saved before"
        for batch in batches(self._away, lambda pair: pair[1].nbytes, nbytes=_BATCH_NBYTES):
            for storage, slot in batch:
                if storage.nbytes() != slot.nbytes:
                    storage.resize_(slot.nbytes)
            yield [(bytes_of(storage), self._slab[slot.start : slot.start + slot.nbytes]) for storage, slot in batch]

    def release(self) -> None:
        """Allow every use: the device has all of it."""
        self.offloaded = False
        self._guards.remove()

    def let_go(self) -> None:
        """Let go of the storages, so that what the optimizer replaces is freed; of a part that is on the device."""
        self._layout, self._away, self._starts = [], [], {}

    def forget(self) -> None:
        """Let go of the host's copies, of a part that is on the device."""
        self._slab, self._copied = None, {}

    @property
    def lendable(self) -> tuple[torch.Tensor, Mapping[int, int], Loans] | None:
        """Where the copies lie while offloaded, by storage, and who reads them; else None."""
        return None if self._slab is None or not self.offloaded else (self._slab, self._starts, self._loans)


def _aligned_nbytes(placed: Placed) -> int:
    return -(-placed.storage.nbytes() // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES


def _optimizer_tensors(optimizer: object) -> Named:
    return optimizer_tensors(optimizers_in(optimizer))


@contextlib.contextmanager
def _explained(done: str, parts: list[_Part], *, fix: str) -> Iterator[None]:
    """Turn any error inside into one that says what it stopped; hwrl's own say it already."""
    try:
        yield
    except HwrlError:
        raise
    except Exception as exc:
        names = " and ".join(part.name for part in parts)
        raise MemoryStateError(f"the {names} cannot be {done}", why=str(exc) or repr(exc), fix=fix) from exc
