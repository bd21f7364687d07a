"""Move a model and its optimizer between the device and the host: :class:`Offloader`."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
import weakref
from collections.abc import Iterator

import torch
from torch import nn

from hwrl.discovery import backend_or_default
from hwrl.errors import HwrlError, MemoryStateError
from hwrl.interfaces import Backend, Moved, Transfer
from hwrl.memory.guards import Guards, lenders, optimizers_in
from hwrl.memory.lending import HostCopies, HostCopy
from hwrl.memory.part import Copies, OffloadablePart
from hwrl.memory.pool import PinnedPool
from hwrl.memory.storages import NamedTensors, local_tensor, model_tensors, optimizer_tensors

_log = logging.getLogger(__name__)
_BATCH_NBYTES = 256 << 20  # copying a batch takes several times as long as the fingerprints of the next one


class Offloader:
    """Moves a model's parameters and buffers, and its optimizer's state, to the host and back.

    Works on plain modules and on FSDP2 (each rank moves its own shards). Tied parameters and shared storages move
    once. ``optimizer`` is an optimizer of torch, or a wrapper around some, such as accelerate's. Parameters of the
    optimizer outside the model, such as its own float32 copies, belong to its state. A tensor subclass moves if it has
    ``__tensor_flatten__``, or if it has memory of its own; then the tensors in its attributes move, too. Device memory
    is really freed. It comes back under the same Parameter objects and storages, so the optimizer, FSDP2 and views
    stay valid. Gradients do not move: call ``zero_grad`` first.

    A storage is not copied to the host again if its content is unchanged: its tensors' version counters, and a
    fingerprint of its bytes, computed on the device. (Counters alone are not enough: fused optimizers, and ``foreach``
    operations on DTensors, do not increment them.)

    Device memory is freed last: after all of it was found to be movable, the host has a copy, and the guards are
    installed. An error at any point leaves everything unchanged.

    While a part is offloaded, ``forward`` (compiled too), ``step``, ``state_dict`` and ``load_state_dict`` raise
    :class:`~hwrl.errors.MemoryStateError`. So does reading the values of a plain parameter, buffer or tensor of the
    optimizer. Reads of views from before, and of tensor subclasses, are not guarded and may crash the process.

    The offloader owns the host memory. ``close``, leaving the context, or the end of the object loads everything and
    frees it; if the device has no room then, the host memory is kept. A new offloader for the same model first closes
    the earlier one. Tensors that an offloader of another model has offloaded are refused. Copies run in
    batches of about ``batch_nbytes``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: object = None,
        *,
        backend: Backend | None = None,
        batch_nbytes: int = _BATCH_NBYTES,
    ) -> None:
        self._model, self._backend = model, backend_or_default(backend)
        self._pool = PinnedPool(self._backend)
        self._stream = self._backend.stream()
        self._lending = threading.Event()
        optimizers_in(optimizer)  # raises for a wrapper without an optimizer
        find_parameters = functools.partial(model_tensors, model)
        self._parameters = OffloadablePart(
            "parameters",
            self._backend,
            find_parameters,
            Guards("parameters", model, optimizer, self._lending),
            batch_nbytes=batch_nbytes,
        )
        self._optimizer = OffloadablePart(
            "optimizer",
            self._backend,
            functools.partial(_optimizer_tensors, optimizer),
            Guards("optimizer", model, optimizer, self._lending),
            batch_nbytes=batch_nbytes,
            excluding=find_parameters,
        )
        for other in list(_offloaders):
            if other._model is model:
                other.close()
        for part in (self._parameters, self._optimizer):
            part.require_free()
        _offloaders.add(self)
        self._is_made = True

    def __del__(self) -> None:
        if not getattr(self, "_is_made", False) or sys.is_finalizing():
            return
        try:
            self.close()
        except Exception:  # noqa: BLE001 - logged. The device has no room, and the host has the only copy
            _kept.append(self)
            _offloaders.add(self)  # the collector of cycles has removed it
            _log.exception("an Offloader ended, and its model stays on the host: make a new one and load it")

    @property
    def can_lend(self) -> bool:
        """Whether :meth:`lending` serves all offloaded parts; else save inside :meth:`loaded`.

        Tensors of some classes, such as states of 8-bit optimizers, cannot be lent: only their class can put the values
        together.
        """
        return self._parameters.can_lend and self._optimizer.can_lend

    @property
    def pool_nbytes(self) -> int:
        """The bytes of host memory for copies."""
        return self._pool.nbytes

    def offload(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Move the selected parts to the host and free their device memory; skip parts that are offloaded already.

        Blocks until the copies are complete. Before it overwrites a lent copy, it waits until the reader gives it
        back. Raises :class:`~hwrl.errors.MemoryStateError`, with everything unchanged, if a tensor's memory cannot be
        moved, or on any other error.
        """
        parts = [part for part in self._selected(params=params, optimizer=optimizer) if not part.offloaded]
        moved = Transfer()
        with _explained("offloaded", parts, fix="nothing was moved: remove the cause and offload again"):
            try:
                self._move_to_host(parts, moved)
            except BaseException:
                self._undo_offload(parts)
                raise
        return moved

    def _move_to_host(self, parts: list[OffloadablePart], moved: Transfer) -> None:
        self._stream.synchronize()  # an earlier load may still read the slab
        for part in parts:
            part.find_storages()
        for part in parts:
            for copies in part.copies_to_host(self._pool):
                self._copy(copies, moved)
        self._stream.synchronize()
        for part in parts:
            part.forbid_use()
        for part in parts:
            part.free_device()
        if parts:
            self._backend.empty_cache()

    def _undo_offload(self, parts: list[OffloadablePart]) -> None:
        freed = [part for part in parts if part.offloaded]
        for part in parts:
            if not part.offloaded:
                part.allow_use()
                part.drop_storages()
        if freed:
            fix = "the host has all of it: free device memory and load"
            with _explained("brought back after an error", freed, fix=fix):
                self._move_to_device(freed)
        for part in freed:
            part.drop_storages()

    def load(self, *, params: bool = True, optimizer: bool = True) -> Transfer:
        """Bring the selected parts back to the device; skip parts that are there already.

        Does not block if the backend has streams: the caller's current stream waits for the copies. Raises
        :class:`~hwrl.errors.MemoryStateError`, with everything unchanged, if the device has no room, or on any other
        error. The host keeps its copies for another load.
        """
        parts = [part for part in self._selected(params=params, optimizer=optimizer) if part.offloaded]
        with _explained("loaded", parts, fix="the host still has all of it: free device memory and load again"):
            moved = self._move_to_device(parts)
        for part in parts:
            part.drop_storages()
        return moved

    def _move_to_device(self, parts: list[OffloadablePart]) -> Transfer:
        moved = Transfer()
        try:
            for part in parts:
                for copies in part.copies_to_device():
                    self._copy(copies, moved)
            self._backend.current_stream().wait_stream(self._stream)
            for part in parts:
                part.allow_use()
        except BaseException:
            for part in parts:
                part.forbid_use()
            self._stream.synchronize()  # copies may still write to memory that is freed next
            for part in parts:
                part.free_device()
            raise
        return moved

    @contextlib.contextmanager
    def loaded(self, *, params: bool = True, optimizer: bool = True) -> Iterator[Moved]:
        """Load the selected parts for the block; restore the earlier state at its end, after errors too."""
        selected = self._selected(params=params, optimizer=optimizer)
        was_offloaded = [part.offloaded for part in selected]
        moved = Moved()
        try:
            moved.load = self.load(params=params, optimizer=optimizer)
            yield moved
        finally:
            to_host = [part for part, offloaded in zip(selected, was_offloaded, strict=True) if offloaded]
            to_device = [part for part in selected if part not in to_host]
            moved.offload = self.offload(params=self._parameters in to_host, optimizer=self._optimizer in to_host)
            self.load(params=self._parameters in to_device, optimizer=self._optimizer in to_device)

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """Allow ``state_dict`` of offloaded parts for the block. Its tensors are empty; :meth:`lend` has their values.

        A checkpoint can so save offloaded parts from the host, without a load and without a copy:
        ``with offloader.lending(): manager.save(step, state_of(model, optimizer), offloader=offloader)``.
        """
        self._lending.set()
        lenders.add(id(self))
        try:
            yield
        finally:
            self._lending.clear()
            lenders.discard(id(self))

    def saving(self) -> contextlib.AbstractContextManager[object]:
        """Let a checkpoint read the parts in the block: :meth:`lending` if it serves them all, else :meth:`loaded`."""
        return self.lending() if self.can_lend else self.loaded()

    def lend(self, tensor: torch.Tensor) -> HostCopy | None:
        """Lend the host copy of an offloaded tensor (of a DTensor: its local part); None if it is not offloaded.

        The copy is valid until it is given back, even if the parts are loaded and offloaded meanwhile.
        """
        copies = self.lend_all()
        try:
            return copies.lend(local_tensor(tensor, is_offloaded=copies.holds))
        finally:
            copies.give_back()

    def lend_all(self) -> HostCopies:
        """Lend the host copies of all offloaded parts at once."""
        return HostCopies([part.lendable for part in (self._parameters, self._optimizer) if part.lendable is not None])

    def close(self) -> None:
        """Load everything and free the host memory; lent copies are freed when given back. May be called again."""
        self.load()
        self._stream.synchronize()
        for part in (self._parameters, self._optimizer):
            part.drop_slab()
        self._pool.close()

    def __enter__(self) -> Offloader:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _selected(self, *, params: bool, optimizer: bool) -> list[OffloadablePart]:
        return [self._parameters] * params + [self._optimizer] * optimizer

    def _copy(self, copies: Copies, moved: Transfer) -> None:
        """Queue ``copies`` on the side stream, after the current stream's work, and count them in ``moved``."""
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


_offloaders: weakref.WeakSet[Offloader] = weakref.WeakSet()
_kept: list[Offloader] = []


def _optimizer_tensors(optimizer: object) -> NamedTensors:
    return optimizer_tensors(optimizers_in(optimizer))


@contextlib.contextmanager
def _explained(done: str, parts: list[OffloadablePart], *, fix: str) -> Iterator[None]:
    """Raise MemoryStateError, with the parts' names, for any exception in the block other than hwrl's own."""
    try:
        yield
    except HwrlError:
        raise
    except Exception as exc:
        names = " and ".join(part.name for part in parts) or "memory"  # no part was left to move, and the device failed
        raise MemoryStateError(f"the {names} cannot be {done}", why=str(exc) or repr(exc), fix=fix) from exc
