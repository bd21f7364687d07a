"""Host memory for copies: :func:`host_empty`, and :class:`PageLocked`, which locks mapped memory in place."""

from __future__ import annotations

import mmap
import weakref

import torch

from hwrl.interfaces import Backend, Capability


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
