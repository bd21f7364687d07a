"""Page-locked host memory: :class:`PinnedPool` allocates it once; :class:`PageLocked` locks mapped memory in place."""

from __future__ import annotations

import contextlib
import mmap
import weakref

import torch

from hwrl.discovery import backend_or_default
from hwrl.errors import UnsupportedError
from hwrl.interfaces import Backend, Capability


class PinnedPool:
    """Page-locked host memory by name, allocated once and reused.

    For a device that cannot lock memory (``pinned_memory``) it is usual memory, and copies block. The pool owns its
    slabs. :meth:`close`, or leaving the context, frees them; do not use them afterwards.

    >>> from hwrl.discovery import get_backend
    >>> with PinnedPool(get_backend()) as pool:
    ...     first = pool.slab("parameters", nbytes=1000)
    ...     pool.slab("parameters", nbytes=10) is first, pool.nbytes
    (True, 1000)
    """

    def __init__(self, backend: Backend | None = None) -> None:
        self._backend = backend_or_default(backend)
        self._slabs: dict[str, torch.Tensor] = {}
        self._locks: dict[str, PageLocked] = {}

    def slab(self, name: str, *, nbytes: int) -> torch.Tensor:
        """Return the slab ``name``, a 1-d uint8 tensor of at least ``nbytes``.

        If the old slab is too small, the pool frees it first and allocates a larger one; the content is lost.
        """
        old = self._slabs.get(name)
        if old is not None and old.numel() >= nbytes:
            return old
        del old
        self._free(name)
        slab = self._slabs[name] = self._allocate(name, nbytes)
        return slab

    @property
    def nbytes(self) -> int:
        """The total bytes of the pool's slabs."""
        return sum(slab.numel() for slab in self._slabs.values())

    def close(self) -> None:
        """Free every slab."""
        for name in list(self._slabs):
            self._free(name)

    def __enter__(self) -> PinnedPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _allocate(self, name: str, nbytes: int) -> torch.Tensor:
        if nbytes:
            with contextlib.suppress(UnsupportedError):
                lock = self._locks[name] = PageLocked(mmap.mmap(-1, nbytes), backend=self._backend)
                return lock.memory
        return host_empty(self._backend, nbytes)

    def _free(self, name: str) -> None:
        self._slabs.pop(name, None)
        lock = self._locks.pop(name, None)
        if lock is not None:
            lock.close()


def host_empty(backend: Backend, nbytes: int) -> torch.Tensor:
    """Return new host memory (1-d uint8): page-locked, or usual memory if the backend says that it cannot lock any."""
    if backend.supports(Capability.PINNED_MEMORY).usable:
        return backend.pinned_empty(nbytes)
    return torch.empty(nbytes, dtype=torch.uint8)


class PageLocked:
    """The bytes of ``mapping`` as ``memory`` (1-d uint8), page-locked until :meth:`close` or deletion.

    It takes exactly the mapping's bytes. torch's own pinned memory is rounded up to a power of two, and never returned
    to the system. Locking blocks: gigabytes take seconds. Raises :class:`~hwrl.errors.UnsupportedError` if the backend
    cannot lock the memory.
    """

    def __init__(self, mapping: mmap.mmap, *, backend: Backend) -> None:
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        backend.register_host_memory(self.memory)
        self._unlock = weakref.finalize(self, _unlock, self.memory, backend)

    def close(self) -> None:
        """Wait for the device and unlock the memory; it lives on while tensors use it. May be called again."""
        self._unlock()


def _unlock(memory: torch.Tensor, backend: Backend) -> None:
    backend.synchronize()  # copies may be in progress
    backend.unregister_host_memory(memory)
