"""Where a state is copied, so that it may change while it is written: :class:`Staging`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping

import torch

from hwrl.checkpoint.format import split
from hwrl.checkpoint.format.shards import Part
from hwrl.checkpoint.saving.ring import Ring
from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import Backend, Capability, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import batches, place_of

_ALIGNMENT_NBYTES = 64
_CLONES_NBYTES = 512 << 20  # allocated at once, since the device takes milliseconds for each; and so freed

_log = logging.getLogger(__name__)

Tensors = Mapping[Part, torch.Tensor]


class Staging:
    """Host memory for copies of a state, kept from save to save; with ``on_device`` the device's own memory instead.

    On the host it is one page-locked slab, as large as what is copied. On the device it is memory that the process
    did not need for anything else so far, and freed with the last reference to a copy; what has no room there goes to
    the host.

    ``ring`` is how ``readers`` threads read what is on the device. Timeline: ``copying``, and when no copy is left,
    ``freed``, from any thread; then the same again.
    """

    def __init__(self, backend: Backend, *, on_device: bool, readers: int) -> None:
        if on_device:
            backend.require(Capability.MEMORY_STATS, needed_for="stage a save on the device")
        self._backend, self._on_device = backend, on_device
        self._pool = PinnedPool(backend)
        self._places: dict[Part, torch.Tensor] = {}
        self._side: StreamLike | None = None
        self._needed_nbytes = self._peak_nbytes = self._beside_nbytes = 0
        self._readers = readers
        self.ring = Ring(backend, self._pool)

    @property
    def nbytes(self) -> int:
        """The bytes of host memory that are held."""
        return self._pool.nbytes

    def open_ring(self, tensors: Tensors) -> None:
        """Prepare ``ring`` for ``tensors``."""
        sizes = [tensor.nbytes for tensor in tensors.values()]
        if sizes:
            nbytes = _padded(max(1, min(max(sizes), split.PIECE_NBYTES)))
            self.ring.open(nbytes=nbytes, places=max(1, min(self._readers, -(-sum(sizes) // nbytes))))

    def settle(self) -> None:
        """Wait for what is queued on the device, so that other threads may read what it changes."""
        self._backend.synchronize()

    @contextlib.contextmanager
    def copying(self, tensors: Tensors) -> Iterator[tuple[Tensors, Tensors]]:
        """Copy ``tensors`` while the block runs; yields the copies on the host and on the device, complete after it."""
        here = self._cloned(tensors) if self._on_device else {}
        away = {part: tensor for part, tensor in tensors.items() if part not in here}
        if not self._fits(away):
            self._lay_out(away)
        self._side = stream = self._backend.stream()
        stream.wait_stream(self._backend.current_stream())
        try:
            with stream:
                for part, tensor in away.items():
                    self._places[part].copy_(tensor, non_blocking=True)
            yield self._places, here
        finally:
            stream.synchronize()

    def freed(self) -> None:
        """Take note that no copy is on the device any more: what others took beside them shows in the peak."""
        beside_nbytes, self._beside_nbytes = self._beside_nbytes, 0
        if beside_nbytes and self._side is not None:
            with self._side:  # makes its device this thread's
                self._note_need(beside_nbytes=beside_nbytes)

    def close(self) -> None:
        """Free the host memory."""
        self._places = {}
        self.ring.close()
        self._pool.close()

    # -- on the device ------------------------------------------------------------------------------------------

    def _cloned(self, tensors: Tensors) -> dict[Part, torch.Tensor]:
        """Return copies of ``tensors`` on the device, of as many as have room."""
        there = [pair for pair in tensors.items() if pair[1].device.type == self._backend.info.device_type]
        clones: dict[Part, torch.Tensor] = {}
        left = self._room()  # before the first is allocated
        for batch in batches(there, lambda pair: _padded(pair[1].nbytes), nbytes=_CLONES_NBYTES):
            slab = self._allocate(sum(_padded(tensor.nbytes) for _, tensor in batch), left)
            if slab is not None:
                left -= slab.nbytes
                clones |= _lay(slab, dict(batch))
        self._beside_nbytes = sum(tensor.nbytes for tensor in clones.values())
        if clones:
            torch._foreach_copy_(list(clones.values()), [tensors[part] for part in clones])  # a kernel for many
        missing = sum(tensor.nbytes for part, tensor in there if part not in clones)
        if missing:
            _log.warning("%d bytes of the state have no room on the device; they are staged on the host", missing)
        return clones

    def _room(self) -> int:
        """Return the bytes that were free even when this process took most for other things than these copies.

        An estimate: of what was taken beside copies, those that were freed by then are not known.
        """
        self._note_need(beside_nbytes=0)
        info = self._backend.memory_info()
        return info.free_nbytes + info.reserved_nbytes - self._needed_nbytes

    def _note_need(self, *, beside_nbytes: int) -> None:
        """If the process took more than ever before, all but ``beside_nbytes`` of it was for others."""
        peak_nbytes = self._backend.memory_info().peak_nbytes
        if peak_nbytes > self._peak_nbytes:
            self._peak_nbytes = peak_nbytes
            self._needed_nbytes = max(self._needed_nbytes, peak_nbytes - beside_nbytes)

    def _allocate(self, nbytes: int, room: int) -> torch.Tensor | None:
        if nbytes > room:
            return None
        with contextlib.suppress(DeviceMemoryError), self._backend.allocating("a copy of the state"):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device())
        return None

    # -- on the host --------------------------------------------------------------------------------------------

    def _fits(self, tensors: Tensors) -> bool:
        return self._places.keys() == tensors.keys() and all(
            place.shape == tensor.shape and place.dtype == tensor.dtype
            for place, tensor in ((self._places[part], tensor) for part, tensor in tensors.items())
        )

    def _lay_out(self, tensors: Tensors) -> None:
        self._places = {}  # before the slab: one that is too small is freed only when nothing lies in it
        slab = self._pool.slab("staging", nbytes=sum(_padded(tensor.nbytes) for tensor in tensors.values()))
        self._places = _lay(slab, tensors)


def _lay(slab: torch.Tensor, tensors: Tensors) -> dict[Part, torch.Tensor]:
    """Return a place in ``slab`` for each of ``tensors``, one behind the other."""
    places, start = {}, 0
    for part, tensor in tensors.items():
        places[part] = place_of(slab, start, tensor)
        start += _padded(tensor.nbytes)
    return places


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
