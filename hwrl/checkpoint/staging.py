"""Memory for copies of a state: :class:`StagingMemory`. The state may change while its copy is written."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping

import torch

from hwrl.checkpoint.read_buffers import ReadBuffers
from hwrl.checkpoint.shards import LocalKey
from hwrl.checkpoint.tuning import SaveTuning
from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import Backend, Capability, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import batches, place_of

_ALIGNMENT_NBYTES = 64

_log = logging.getLogger(__name__)

LocalTensors = Mapping[LocalKey, torch.Tensor]


class StagingMemory:
    """Memory for copies of a state: on the host or, with ``on_device``, on the device.

    On the host it is one slab of page-locked memory. Each copy in it is padded to 64 bytes. The slab is kept from one
    save to the next.

    On the device it is only memory that the process has never needed for anything else. It is freed with the last
    reference to a copy. Tensors that do not fit there are copied to the host.

    ``buffers`` are page-locked host buffers for reading tensors that are not copied to the host.

    Timeline of a save: ``copying``; ``open_buffers``; when all copies on the device have been dropped,
    ``note_copies_freed`` from any thread.
    """

    def __init__(self, backend: Backend, tuning: SaveTuning, *, on_device: bool) -> None:
        if on_device:
            backend.require(Capability.MEMORY_STATS, needed_for="stage a save on the device")
        self._backend, self._tuning, self._on_device = backend, tuning, on_device
        self._pool = PinnedPool(backend)
        self._host_places: dict[LocalKey, torch.Tensor] = {}
        self.buffers = ReadBuffers(backend, self._pool)

    @property
    def nbytes(self) -> int:
        """The bytes of page-locked host memory that this object holds, buffers included."""
        return self._pool.nbytes

    def open_buffers(self, tensors: LocalTensors) -> None:
        """Make ``buffers`` large enough for reading ``tensors``, item by item."""
        sizes = [tensor.nbytes for tensor in tensors.values()]
        if sizes:
            nbytes = _padded(max(1, min(max(sizes), self._tuning.max_item_nbytes)))
            self.buffers.open(nbytes=nbytes, count=max(1, min(self._tuning.max_files, -(-sum(sizes) // nbytes))))

    def synchronize(self) -> None:
        """Wait until the device has completed its queued operations, so that other threads may read the results."""
        self._backend.synchronize()

    @contextlib.contextmanager
    def copying(self, tensors: LocalTensors) -> Iterator[tuple[LocalTensors, LocalTensors]]:
        """Copy ``tensors``. Yield the copies on the host, and the copies on the device.

        The block runs while the copies are being made. They are complete when the block ends.
        """
        on_device = self._clone(tensors) if self._on_device else {}
        to_host = {key: tensor for key, tensor in tensors.items() if key not in on_device}
        if not self._fits(to_host):
            self._allocate_host_places(to_host)
        stream = self._backend.stream()
        stream.wait_stream(self._backend.current_stream())
        try:
            with stream:
                for key, tensor in to_host.items():
                    self._host_places[key].copy_(tensor, non_blocking=True)
            yield self._host_places, on_device
        finally:
            stream.synchronize()

    def note_copies_freed(self) -> None:
        """Note that the caller has dropped all copies on the device, or is about to. May be called more than once."""
        if self._on_device:
            self._spare.note_copies_freed()

    def close(self) -> None:
        """Free the host memory."""
        self._host_places = {}
        self.buffers.close()
        self._pool.close()

    # -- on the device ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _spare(self) -> _SpareDeviceMemory:
        return _SpareDeviceMemory(self._backend, self._backend.stream())

    def _clone(self, tensors: LocalTensors) -> dict[LocalKey, torch.Tensor]:
        """Copy tensors within the device, as many as fit. Return the copies."""
        device_type = self._backend.info.device_type
        candidates = [(key, tensor) for key, tensor in tensors.items() if tensor.device.type == device_type]
        clones: dict[LocalKey, torch.Tensor] = {}
        spare_nbytes = self._spare.measure()  # before the first allocation
        for batch in batches(candidates, _padded_nbytes, nbytes=self._tuning.clone_batch_nbytes):
            slab = self._allocate(sum(map(_padded_nbytes, batch)), spare_nbytes)
            if slab is not None:
                spare_nbytes -= slab.nbytes
                clones |= _assign_places(slab, dict(batch))
        self._spare.note_copies(sum(tensor.nbytes for tensor in clones.values()))
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

    # -- on the host --------------------------------------------------------------------------------------------

    def _fits(self, tensors: LocalTensors) -> bool:
        """Return whether the slab of the last save has exactly the places that ``tensors`` need."""
        return self._host_places.keys() == tensors.keys() and all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for place, tensor in ((self._host_places[key], tensor) for key, tensor in tensors.items())
        )

    def _allocate_host_places(self, tensors: LocalTensors) -> None:
        self._host_places = {}  # the pool can free the old slab only when no tensor uses it
        slab = self._pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in tensors.values()))
        self._host_places = _assign_places(slab, tensors)


class _SpareDeviceMemory:
    """Estimates how much device memory the process has never needed, except for copies of a state.

    A peak during a save includes our own copies. We subtract all of them, although some may already have been freed; so
    the result may be too large.

    ``stream`` is a stream of the device. Entering it makes the device the current device of a thread.
    """

    def __init__(self, backend: Backend, stream: StreamLike) -> None:
        self._backend, self._stream = backend, stream
        self._peak_nbytes = self._needed_nbytes = self._copies_nbytes = 0

    def measure(self) -> int:
        """Return the bytes that were free at the process's peak. No copy may be on the device during this call."""
        self._note_peak(copies_nbytes=0)
        info = self._backend.memory_info()
        return info.free_nbytes + info.reserved_nbytes - self._needed_nbytes

    def note_copies(self, nbytes: int) -> None:
        """Note that copies with ``nbytes`` in all are now on the device."""
        self._copies_nbytes = nbytes

    def note_copies_freed(self) -> None:
        """Note that all copies on the device are dropped. May be called from any thread, and more than once."""
        copies_nbytes, self._copies_nbytes = self._copies_nbytes, 0
        if copies_nbytes:
            with self._stream:
                self._note_peak(copies_nbytes=copies_nbytes)

    def _note_peak(self, *, copies_nbytes: int) -> None:
        """Read the process's peak.

        If the peak has risen, the process needed the peak minus ``copies_nbytes`` for itself. Remember the largest such
        value.
        """
        peak_nbytes = self._backend.memory_info().peak_nbytes
        if peak_nbytes > self._peak_nbytes:
            self._peak_nbytes = peak_nbytes
            self._needed_nbytes = max(self._needed_nbytes, peak_nbytes - copies_nbytes)


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
