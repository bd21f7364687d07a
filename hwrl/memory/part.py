"""One part of an offloader, the parameters or the optimizer's state: :class:`OffloadablePart`."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hwrl.errors import MemoryStateError
from hwrl.interfaces import Backend
from hwrl.memory.fingerprint import bytes_of, fingerprints
from hwrl.memory.guards import Guards, OffloadedStorage
from hwrl.memory.lending import Loans, Range
from hwrl.memory.pool import PinnedPool
from hwrl.memory.slabs import batches
from hwrl.memory.storages import (
    NamedTensors,
    SharedStorage,
    StoredTensor,
    device_storages,
    require_resizing,
    stored_tensors,
)

_ALIGNMENT_NBYTES = 512

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source."""


@dataclass(frozen=True)
class StorageCopy:
    """A storage's copy in the slab: its range, and the storage's version counters and fingerprint at that time."""

    start: int
    nbytes: int
    versions: tuple[int, ...]
    fingerprint: int


class OffloadablePart:
    """The storages of one part, and their copies in one slab.

    To the host: ``find_storages``, ``copies_to_host``, ``forbid_use``, ``free_device``. To the device:
    ``copies_to_device``, ``allow_use``, ``drop_storages``. After an error on the way to the host: ``copies_to_device``
    if it was freed, then ``allow_use``. After an error on the way to the device: ``forbid_use``, ``free_device``.
    """

    def __init__(
        self,
        name: str,
        backend: Backend,
        find: Callable[[], NamedTensors],
        guards: Guards,
        *,
        batch_nbytes: int,
        excluding: Callable[[], NamedTensors] = tuple,
    ) -> None:
        self.name, self._backend = name, backend
        self._find, self._excluding, self._guards, self._batch_nbytes = find, excluding, guards, batch_nbytes
        self._slab: torch.Tensor | None = None
        self._slab_content: dict[int, StorageCopy] = {}  # by start
        self._storages: list[SharedStorage] = []
        self._copies: list[tuple[torch.UntypedStorage, StorageCopy]] = []  # in the order of the slab
        self._ranges: dict[int, Range] = {}  # by storage, while offloaded
        self._loans = Loans()
        self.offloaded = False

    def find_storages(self) -> None:
        """Find the storages. Raises, with the tensor's name, if one cannot be moved. Changes nothing."""
        tensors = self._find_tensors()
        self._storages = device_storages(tensors, self.name, device_type=self._backend.info.device_type)
        if self._storages:
            require_resizing(self._storages[0].storage.device)

    def _find_tensors(self) -> list[StoredTensor]:
        excluded = {tensor.storage_key for tensor in stored_tensors(self._excluding())}
        tensors = [tensor for tensor in stored_tensors(self._find()) if tensor.storage_key not in excluded]
        held = {key for part in list(_offloaded.values()) if part is not self for key in part._ranges}
        for stored in tensors:
            if stored.storage_key in held:
                raise MemoryStateError(
                    f"the {self.name} cannot be offloaded",
                    why=f"{stored.name} is offloaded by another Offloader",
                    fix="load it with that one first, or use one Offloader for all that share memory",
                )
        return tensors

    def require_free(self) -> None:
        """Raise MemoryStateError, with the tensor's name, if another offloader holds a tensor of this part."""
        if _offloaded:
            self._find_tensors()

    def copies_to_host(self, pool: PinnedPool) -> Iterator[Copies]:
        """Yield batches of copies to the host, for storages with new content; changes nothing on the device.

        It compares a batch with the host's content when the caller takes it, while the previous batch is copied.
        """
        starts = list(itertools.accumulate(map(_aligned_nbytes, self._storages), initial=0))
        if self._slab is not None and self._slab.numel() < starts[-1]:
            self.drop_slab()  # the pool frees it before it allocates a larger one
        slab = pool.slab(self.name, nbytes=starts[-1])
        if slab is not self._slab:
            self._slab, self._slab_content = slab, {}
        # The slab's content is unknown until all copies are complete; free_device records it again.
        known, self._slab_content, self._copies = self._slab_content, {}, []
        placed = zip(self._storages, starts, strict=False)
        for batch in batches(placed, lambda pair: pair[0].storage.nbytes(), nbytes=self._batch_nbytes):
            to_copy = []
            prints = fingerprints([shared.storage for shared, _ in batch])
            for (shared, start), fingerprint in zip(batch, prints, strict=True):
                copy = StorageCopy(start, shared.storage.nbytes(), shared.versions, fingerprint)
                self._copies.append((shared.storage, copy))
                if known.get(start) != copy:
                    self._loans.wait(start, start + copy.nbytes)
                    to_copy.append((slab[start : start + copy.nbytes], bytes_of(shared.storage)))
            yield to_copy

    def forbid_use(self) -> None:
        """Make every use of the part raise."""
        classes = (tensor.wrapper_class for shared in self._storages for tensor in shared.tensors)
        alone = [stored.tensor for shared in self._storages for stored in shared.tensors if len(stored.versions) == 1]
        self._guards.install(alone, wrapper_class=next(filter(None, classes), None))

    @property
    def can_lend(self) -> bool:
        """Whether ``state_dict`` works while lending, or now: no offloaded tensor is inside one of another class."""
        return not self.offloaded or self._guards.wrapper_class is None

    def free_device(self) -> None:
        """Free the device memory. The slab holds all of its content, and uses are forbidden."""
        self._slab_content = {copy.start: copy for _, copy in self._copies}
        self._ranges = {storage._cdata: (copy.start, copy.start + copy.nbytes) for storage, copy in self._copies}
        self.offloaded = True
        _offloaded[id(self)] = self
        for storage, _ in self._copies:
            storage.resize_(0)
            storage.__class__ = OffloadedStorage

    def copies_to_device(self) -> Iterator[Copies]:
        """Allocate the device memory again, batch by batch, and yield the copies to fill it.

        It allocates a batch while the previous one is copied. After an error it also fills memory that was not freed,
        because its content is unknown.
        """
        assert self._slab is not None, "copied to the host before"
        for batch in batches(self._copies, lambda pair: pair[1].nbytes, nbytes=self._batch_nbytes):
            for storage, copy in batch:
                storage.__class__ = torch.UntypedStorage
                if storage.nbytes() != copy.nbytes:
                    storage.resize_(copy.nbytes)
            yield [(bytes_of(storage), self._slab[copy.start : copy.start + copy.nbytes]) for storage, copy in batch]

    def allow_use(self) -> None:
        """Allow every use again. The device has all of the part."""
        self.offloaded = False
        _offloaded.pop(id(self), None)
        self._guards.remove()

    def drop_storages(self) -> None:
        """Drop the references to the storages of a part on the device, so tensors replaced later are freed."""
        self._storages, self._copies, self._ranges = [], [], {}

    def drop_slab(self) -> None:
        """Drop the host's copies of a part on the device."""
        self._slab, self._slab_content = None, {}

    @property
    def lendable(self) -> tuple[torch.Tensor, Mapping[int, Range], Loans] | None:
        """The slab, the range of each storage's copy in it, and its loans; None unless the part is offloaded."""
        return None if self._slab is None or not self.offloaded else (self._slab, self._ranges, self._loans)


_offloaded: weakref.WeakValueDictionary[int, OffloadablePart] = weakref.WeakValueDictionary()


def _aligned_nbytes(shared: SharedStorage) -> int:
    return -(-shared.storage.nbytes() // _ALIGNMENT_NBYTES) * _ALIGNMENT_NBYTES
