"""One rank's state in a save: :class:`CapturedState`, and the memory for copies of it: :class:`StagingMemory`.

The state may change while its copy is written.
"""

from __future__ import annotations

import contextlib
import io
import logging
import queue
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwrl.checkpoint.shards import (
    MAX_ITEM_NBYTES,
    LocalKey,
    SaveItem,
    flatten,
    is_offloaded,
    list_items,
    local_tensors,
    offloaded_error,
)
from hwrl.errors import CheckpointSaveError, DeviceMemoryError
from hwrl.interfaces import Backend, Capability, LentState, LentTensor, OffloadedState, StreamLike
from hwrl.memory import HostCopies, PinnedPool
from hwrl.memory.slabs import alone, batches, place_of

_ALIGNMENT_NBYTES = 64

_log = logging.getLogger(__name__)

LocalTensors = Mapping[LocalKey, torch.Tensor]


@dataclass(frozen=True)
class SaveTuning:
    """Sizes and time limits of a save. Keep the defaults; tests use smaller values to reach every branch."""

    max_item_nbytes: int = MAX_ITEM_NBYTES
    """The largest item. Larger tensors are split. A thread of a save reads one item at a time, and so does a load.

    A copy to staging memory is made of whole tensors.
    """
    max_files: int = 4
    """The most tensor files of one rank. One thread writes and hashes each file, mostly without the GIL."""
    min_file_nbytes: int = 64 << 20
    """A rank writes fewer files than ``max_files`` if its files would be smaller than this."""
    clone_batch_nbytes: int = 512 << 20
    """Copies on the device are allocated and freed in batches of this size: each allocation takes milliseconds."""
    look_s: float = 2.0
    """How long a rank looks for the marker files of the other ranks. A network file system may show a new file late."""


# -- the state ------------------------------------------------------------------------------------------------------


class CapturedState:
    """One rank's state, kept until it is written. In a background save, training may change the original meanwhile.

    With ``copy``, the caller may change the contents of ``state`` as soon as this object is made, but not the shape of
    a tensor or the ``pieces`` of a LocalShards until its items are listed. Without ``copy``, the tensors are not
    copied, and the caller must not change them at all until they are written. ``flat`` is the state by names.

    Each local tensor is in one of three mappings:

    - ``on_host``: copies in the staging memory on the host. They are written from there.
    - ``via_buffers``: tensors that are read through the staging's buffers when they are written. They are copies on the
      device or, in a foreground save, the caller's own tensors.
    - ``offloaded``: tensors with empty storage. Their content is in the copies that ``offloader`` lends.

    ``lent_nbytes`` is the size of the tensors in the offloader's copies. This rank may read only some of them.

    Timeline: ``list_items``, ``read_only``, then ``reading`` from any thread, each item once; ``close``.

    Raises CheckpointSaveError for two values with the same name, for a sparse tensor, and for a value that could be
    loaded only by executing a pickle. Raises MemoryStateError for an offloaded tensor without a copy in ``offloader``.
    """

    def __init__(
        self, state: Mapping[str, Any], staging: StagingMemory, *, copy: bool, offloader: OffloadedState | None
    ) -> None:
        self.flat, self._paths = flatten(state, CheckpointSaveError)
        tensors = local_tensors(self.flat)
        for (name, _), tensor in tensors:
            _require_dense(name, tensor)
        self.offloaded = {key: tensor for key, tensor in tensors if is_offloaded(tensor)}
        resident = {key: tensor for key, tensor in tensors if key not in self.offloaded}
        self._staging, self._lock = staging, threading.Lock()
        self._unread: Counter[LocalKey | None] = Counter()
        self._lent: dict[LocalKey, LentTensor] = {}
        self.on_host: LocalTensors = {}
        self.via_buffers: dict[LocalKey, torch.Tensor] = {}
        self._copies: LentState = HostCopies([]) if offloader is None else offloader.lend_all()
        try:
            for (name, _), tensor in self.offloaded.items():
                if not self._copies.holds(tensor):
                    raise offloaded_error(name)
            with staging.copying(resident) if copy else staging.synchronized(resident) as (on_host, buffered):
                self.on_host, self.via_buffers = on_host, buffered
                # encoded while the copies are being made
                self._values = {
                    name: _encode(name, one) for name, one in self.flat.items() if not isinstance(one, torch.Tensor)
                }
            staging.open_buffers(buffered)
        except BaseException:
            self.close()
            raise
        self.staged_nbytes, self.lent_nbytes = _nbytes(on_host), _nbytes(self.offloaded)
        self.cloned_nbytes = _nbytes(buffered) if copy else 0

    def list_items(self, *, max_nbytes: int) -> list[SaveItem]:
        """Return the items of this rank. Tensors of more than ``max_nbytes`` are divided."""
        return list_items(self.flat, self._paths, max_nbytes=max_nbytes)

    def read_only(self, items: Sequence[SaveItem]) -> None:
        """Release what is not in ``items``.

        From each offloaded tensor with an item here, the offloader's copy is borrowed until its last item has been
        read. So an offload waits for these copies only. A tensor in ``via_buffers`` is dropped when its last item has
        been read, so that its memory can be freed.
        """
        self._unread.update([item.key for item in items])
        for key in self.offloaded.keys() & self._unread.keys():
            copy = self._copies.lend(self.offloaded[key])
            assert copy is not None, "checked when the state was captured: that the offloader has a copy"
            self._lent[key] = copy
        self._copies.give_back()
        for key in self.via_buffers.keys() - self._unread.keys():
            del self.via_buffers[key]

    @contextlib.contextmanager
    def reading(self, item: SaveItem) -> Iterator[torch.Tensor | io.BytesIO]:
        """Yield the content of ``item``: a tensor on the host, or the bytes of a non-tensor value."""
        if item.key is None:
            yield self._values[item.entry["name"]]
            return
        ranges = zip(item.begin, item.entry["sizes"], strict=True)
        cut = tuple([slice(begin, begin + size) for begin, size in ranges])
        if item.key in self.via_buffers:
            with self._staging.reading(self.via_buffers[item.key][cut]) as tensor:
                yield tensor
        else:
            whole = self._lent[item.key].tensor if item.key in self._lent else self.on_host[item.key]
            yield alone(whole[cut].contiguous())
        with self._lock:
            self._unread[item.key] -= 1
            if not self._unread[item.key]:
                self.via_buffers.pop(item.key, None)
                if item.key in self._lent:
                    self._lent[item.key].give_back()

    def close(self) -> None:
        """Release the tensors and the offloader's copies. May be called more than once."""
        for copy in self._lent.values():
            copy.give_back()
        self._copies.give_back()
        self.via_buffers.clear()
        self._staging.note_copies_freed()


def _encode(name: str, value: object) -> io.BytesIO:
    """Return a non-tensor value as bytes for ``torch.load(weights_only=True)``."""
    data = io.BytesIO()
    try:
        torch.save(value, data)
        data.seek(0)
        torch.load(data, map_location="cpu", weights_only=True)
    except Exception as exc:  # a user's class may raise any error
        kind, inside = type(value).__name__, re.search(r"(?:GLOBAL |<class '|<function )([\w.<>]+)", str(exc))
        raise CheckpointSaveError(
            f"state {name!r} cannot be saved",
            why=f"this {kind} cannot be saved and read back: {type(exc).__name__}: {exc}"
            if inside is None
            else f"loading this {kind} would execute a pickle that uses {inside[1]}",
            fix="save only tensors, numbers, strings, and dicts, lists and tuples of these",
        ) from exc
    return data


def _require_dense(name: str, tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided:
        why, fix = f"it is a {tensor.layout} tensor", "save its to_dense(), or save the tensors that it consists of"
    elif is_traceable_wrapper_subclass(tensor):
        why = f"its elements are in other tensors of a {type(tensor).__name__}"
        fix = "save the tensors that it consists of; of an unsharded optimizer, the manager's optimizer= does"
    else:
        return
    raise CheckpointSaveError(f"state {name!r} cannot be saved", why=why, fix=fix)


def _nbytes(tensors: LocalTensors) -> int:
    return sum([tensor.nbytes for tensor in tensors.values()])


# -- memory for copies ----------------------------------------------------------------------------------------------


class StagingMemory:
    """Memory for copies of a state: on the host or, with ``on_device``, on the device.

    On the host it is one slab of page-locked memory. Each copy in it is padded to 64 bytes. The slab is kept from one
    save to the next.

    On the device it is only memory that the process has never needed for anything else. It is freed with the last
    reference to a copy. Tensors that do not fit there are copied to the host.

    There are also a few page-locked host buffers, each with a side stream, for reading tensors that are not copied to
    the host. They are kept, too.

    Timeline of a save: ``copying`` or ``synchronized``; ``open_buffers``; ``reading`` from any thread; when all copies
    on the device have been dropped, ``note_copies_freed`` from any thread.
    """

    def __init__(self, backend: Backend, tuning: SaveTuning, *, on_device: bool) -> None:
        if on_device:
            backend.require(Capability.MEMORY_STATS, needed_for="stage a save on the device")
        self._backend, self._tuning, self._on_device = backend, tuning, on_device
        self._pool = PinnedPool(backend)
        self._host_places: dict[LocalKey, torch.Tensor] = {}
        self._free: queue.SimpleQueue[tuple[torch.Tensor, StreamLike]] = queue.SimpleQueue()
        self._buffer_nbytes = self._buffer_count = 0
        self._peak_nbytes = self._needed_nbytes = self._copies_nbytes = 0

    @property
    def nbytes(self) -> int:
        """The bytes of page-locked host memory that this object holds, buffers included."""
        return self._pool.nbytes

    @contextlib.contextmanager
    def synchronized(self, tensors: LocalTensors) -> Iterator[tuple[LocalTensors, dict[LocalKey, torch.Tensor]]]:
        """Yield no copies on the host, and ``tensors`` themselves. Other threads may read them after the block."""
        yield {}, dict(tensors)
        self._backend.synchronize()

    @contextlib.contextmanager
    def copying(self, tensors: LocalTensors) -> Iterator[tuple[LocalTensors, dict[LocalKey, torch.Tensor]]]:
        """Copy ``tensors``. Yield the copies on the host, and the copies on the device.

        The block runs while the copies are being made. They are complete when the block ends.
        """
        self._stream = stream = self._backend.stream()
        on_device = self._clone(tensors) if self._on_device else {}
        to_host = {key: tensor for key, tensor in tensors.items() if key not in on_device}
        places = {key: (place.shape, place.dtype) for key, place in self._host_places.items()}
        if places != {key: (tensor.shape, tensor.dtype) for key, tensor in to_host.items()}:
            self._host_places = {}  # the pool can free the old slab only when no tensor uses it
            slab = self._pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in to_host.values()))
            self._host_places = _assign_places(slab, to_host)
        stream.wait_stream(self._backend.current_stream())
        try:
            with stream:
                for key, tensor in to_host.items():
                    self._host_places[key].copy_(tensor, non_blocking=True)
            yield self._host_places, on_device
        finally:
            stream.synchronize()

    def note_copies_freed(self) -> None:
        """Note that all copies on the device are dropped, or are about to be. May be called more than once."""
        copies_nbytes, self._copies_nbytes = self._copies_nbytes, 0
        if copies_nbytes:
            with self._stream:  # it makes the stream's device the current device of this thread
                self._note_peak(copies_nbytes=copies_nbytes)

    def close(self) -> None:
        """Free the host memory."""
        self._host_places = {}
        self._close_buffers()
        self._pool.close()

    # -- buffers ------------------------------------------------------------------------------------------------

    def open_buffers(self, tensors: LocalTensors) -> None:
        """Provide the buffers for reading ``tensors``, item by item. No thread may be reading at this time."""
        sizes = [tensor.nbytes for tensor in tensors.values()]
        if not sizes:
            return
        nbytes = _padded(max(1, min(max(sizes), self._tuning.max_item_nbytes)))
        count = max(1, min(self._tuning.max_files, -(-sum(sizes) // nbytes)))
        if nbytes <= self._buffer_nbytes and count <= self._buffer_count:
            return
        nbytes, count = max(nbytes, self._buffer_nbytes), max(count, self._buffer_count)
        self._close_buffers()  # the pool can free a slab that is too small only when no tensor uses it
        slab = self._pool.slab("ring", nbytes=nbytes * count)
        for start in range(0, nbytes * count, nbytes):
            self._free.put((slab[start : start + nbytes], self._backend.stream()))
        self._buffer_nbytes, self._buffer_count = nbytes, count

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a contiguous copy of ``tensor`` in a buffer. After the block, the buffer is used for other tensors.

        This waits until a buffer is free and the copy is complete. Once the block begins, ``tensor`` is no longer read.
        The operations that fill ``tensor`` must be complete before the call.
        """
        buffer, stream = self._free.get()
        try:
            copy = alone(place_of(buffer, 0, tensor))
            with stream:  # this also makes the stream's device the current device of this thread
                copy.copy_(tensor, non_blocking=True)
            stream.synchronize()
            yield copy
        finally:
            self._free.put((buffer, stream))

    def _close_buffers(self) -> None:
        while not self._free.empty():
            self._free.get()
        self._buffer_nbytes = self._buffer_count = 0

    # -- on the device ------------------------------------------------------------------------------------------

    def _note_peak(self, *, copies_nbytes: int) -> None:
        """Read the process's peak. If it has risen, the process needed it without ``copies_nbytes`` for itself.

        A peak during a save includes our own copies. We subtract all of them, although some may already have been
        freed; so the process may have needed more.
        """
        peak_nbytes = self._backend.memory_info().peak_nbytes
        if peak_nbytes > self._peak_nbytes:
            self._peak_nbytes = peak_nbytes
            self._needed_nbytes = max(self._needed_nbytes, peak_nbytes - copies_nbytes)

    def _clone(self, tensors: LocalTensors) -> dict[LocalKey, torch.Tensor]:
        """Copy tensors within the device, as many as fit. Return the copies."""
        device_type = self._backend.info.device_type
        candidates = [(key, tensor) for key, tensor in tensors.items() if tensor.device.type == device_type]
        clones: dict[LocalKey, torch.Tensor] = {}
        self._note_peak(copies_nbytes=0)  # before the first allocation
        info = self._backend.memory_info()
        spare_nbytes = info.free_nbytes + info.reserved_nbytes - self._needed_nbytes  # free at the process's peak
        for batch in batches(candidates, _padded_nbytes, nbytes=self._tuning.clone_batch_nbytes):
            slab = self._allocate(sum(map(_padded_nbytes, batch)), spare_nbytes)
            if slab is not None:
                spare_nbytes -= slab.nbytes
                clones |= _assign_places(slab, dict(batch))
        self._copies_nbytes = _nbytes(clones)
        if clones:
            torch._foreach_copy_(list(clones.values()), [tensors[key] for key in clones])  # one kernel copies many
        missing = sum(tensor.nbytes for key, tensor in candidates if key not in clones)
        if missing:
            _log.warning("%d bytes of the state do not fit on the device and are staged on the host instead", missing)
        return clones

    def _allocate(self, nbytes: int, spare_nbytes: int) -> torch.Tensor | None:
        """Allocate a slab on the device. Return None if it does not fit."""
        if nbytes > spare_nbytes:
            return None
        with contextlib.suppress(DeviceMemoryError), self._backend.allocating("a copy of the state"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device())
        return None


def _assign_places(slab: torch.Tensor, tensors: LocalTensors) -> dict[LocalKey, torch.Tensor]:
    """Return a view of ``slab`` for each of ``tensors``, one after the other."""
    places, start = {}, 0
    for key, tensor in tensors.items():
        places[key] = place_of(slab, start, tensor)
        start += _padded(tensor.nbytes)
    return places


def _padded_nbytes(keyed: tuple[LocalKey, torch.Tensor]) -> int:
    return _padded(keyed[1].nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
