"""Memory for copies of a state, which may then change while it is written: :class:`StagingMemory`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping

import torch

from hwrl.checkpoint.format.shards import PartKey
from hwrl.checkpoint.saving.read_buffers import ReadBuffers
from hwrl.checkpoint.saving.tuning import SaveTuning
from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import Backend, Capability, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import batches, place_of

_ALIGNMENT_NBYTES = 64

_log = logging.getLogger(__name__)

PartTensors = Mapping[PartKey, torch.Tensor]


class StagingMemory:
    """Page-locked host memory for copies of a state, kept from save to save; with ``on_device``, device memory.

    On the host it is one slab, exactly as large as the copies. On the device it is memory that the process has not
    needed for anything else so far, freed with the last reference to a copy. Tensors that do not fit there are copied
    to the host.

    ``buffers`` are for reading tensors of the device.

    Timeline: ``copying``; when no copy is left, ``note_copies_freed`` from any thread; then the same again.
    """

    def __init__(self, backend: Backend, tuning: SaveTuning, *, on_device: bool) -> None:
        if on_device:
            backend.require(Capability.MEMORY_STATS, needed_for="stage a save on the device")
        self._backend, self._tuning, self._on_device = backend, tuning, on_device
        self._pool = PinnedPool(backend)
        self._host_places: dict[PartKey, torch.Tensor] = {}
        self.buffers = ReadBuffers(backend, self._pool)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory in use."""
        return self._pool.nbytes

    def open_buffers(self, tensors: PartTensors) -> None:
        """Prepare ``buffers`` for reading ``tensors``."""
        sizes = [tensor.nbytes for tensor in tensors.values()]
        if sizes:
            nbytes = _padded(max(1, min(max(sizes), self._tuning.item_nbytes)))
            self.buffers.open(nbytes=nbytes, count=max(1, min(self._tuning.max_files, -(-sum(sizes) // nbytes))))

    def synchronize(self) -> None:
        """Wait for the operations queued on the device. Other threads may read their results then."""
        self._backend.synchronize()

    @contextlib.contextmanager
    def copying(self, tensors: PartTensors) -> Iterator[tuple[PartTensors, PartTensors]]:
        """Copy ``tensors`` while the block runs; yield the copies on the host and those on the device.

        The copies are complete when the block ends.
        """
        on_device = self._clone(tensors) if self._on_device else {}
        to_host = {key: tensor for key, tensor in tensors.items() if key not in on_device}
        if not self._fits(to_host):
            self._lay_out(to_host)
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
        """Tell the estimator that the caller has dropped all device copies. May be called again."""
        if self._on_device:
            self._room.note_copies_freed()

    def close(self) -> None:
        """Free the host memory."""
        self._host_places = {}
        self.buffers.close()
        self._pool.close()

    # -- on the device ------------------------------------------------------------------------------------------

    @functools.cached_property
    def _room(self) -> _DeviceRoom:
        return _DeviceRoom(self._backend, self._backend.stream())

    def _clone(self, tensors: PartTensors) -> dict[PartKey, torch.Tensor]:
        """Return copies on the device, of as many tensors as fit."""
        device_type = self._backend.info.device_type
        candidates = [(key, tensor) for key, tensor in tensors.items() if tensor.device.type == device_type]
        clones: dict[PartKey, torch.Tensor] = {}
        room_nbytes = self._room.measure()  # before the first allocation
        for batch in batches(candidates, _padded_nbytes, nbytes=self._tuning.clone_batch_nbytes):
            slab = self._allocate(sum(map(_padded_nbytes, batch)), room_nbytes)
            if slab is not None:
                room_nbytes -= slab.nbytes
                clones |= _lay(slab, dict(batch))
        self._room.note_copies(sum(tensor.nbytes for tensor in clones.values()))
        if clones:
            torch._foreach_copy_(list(clones.values()), [tensors[key] for key in clones])  # one kernel for many
        missing = sum(tensor.nbytes for key, tensor in candidates if key not in clones)
        if missing:
            _log.warning("%d bytes of the state have no room on the device; they are staged on the host", missing)
        return clones

    def _allocate(self, nbytes: int, room_nbytes: int) -> torch.Tensor | None:
        if nbytes > room_nbytes:
            return None
        with contextlib.suppress(DeviceMemoryError), self._backend.allocating("a copy of the state"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device())
        return None

    # -- on the host --------------------------------------------------------------------------------------------

    def _fits(self, tensors: PartTensors) -> bool:
        """Return whether the slab of the last save has a place for each of ``tensors``, and for nothing else."""
        return self._host_places.keys() == tensors.keys() and all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for place, tensor in ((self._host_places[key], tensor) for key, tensor in tensors.items())
        )

    def _lay_out(self, tensors: PartTensors) -> None:
        self._host_places = {}  # the pool frees a small slab only when no tensor lies in it
        slab = self._pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in tensors.values()))
        self._host_places = _lay(slab, tensors)


class _DeviceRoom:
    """How much device memory the process has never needed for anything but copies of a state.

    It is an estimate: the peak of a step beside a save includes copies, and some of them may have been freed by then.
    Entering ``stream``, one of the device, makes the device a thread's current one.
    """

    def __init__(self, backend: Backend, stream: StreamLike) -> None:
        self._backend, self._stream = backend, stream
        self._peak_nbytes = self._needed_nbytes = self._copies_nbytes = 0

    def measure(self) -> int:
        """Return the bytes still free at the process's peak. No copy is on the device now."""
        self._note_peak(copies_nbytes=0)
        info = self._backend.memory_info()
        return info.free_nbytes + info.reserved_nbytes - self._needed_nbytes

    def note_copies(self, nbytes: int) -> None:
        """Note that copies of ``nbytes`` are on the device from now on."""
        self._copies_nbytes = nbytes

    def note_copies_freed(self) -> None:
        """Note the peak with the copies; none is on the device now. May be called from any thread, and again."""
        copies_nbytes, self._copies_nbytes = self._copies_nbytes, 0
        if copies_nbytes:
            with self._stream:
                self._note_peak(copies_nbytes=copies_nbytes)

    def _note_peak(self, *, copies_nbytes: int) -> None:
        """If there is a new peak, everything in it but ``copies_nbytes`` was needed for something else."""
        peak_nbytes = self._backend.memory_info().peak_nbytes
        if peak_nbytes > self._peak_nbytes:
            self._peak_nbytes = peak_nbytes
            self._needed_nbytes = max(self._needed_nbytes, peak_nbytes - copies_nbytes)


def _lay(slab: torch.Tensor, tensors: PartTensors) -> dict[PartKey, torch.Tensor]:
    """Return a place in ``slab`` for each of ``tensors``, one behind the other."""
    places, start = {}, 0
    for key, tensor in tensors.items():
        places[key] = place_of(slab, start, tensor)
        start += _padded(tensor.nbytes)
    return places


def _padded_nbytes(keyed: tuple[PartKey, torch.Tensor]) -> int:
    return _padded(keyed[1].nbytes)


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
