"""Mapped host memory that is page-locked where it lies: :class:`PageLocked`."""

from __future__ import annotations

import mmap
import weakref

import torch

from hwrl.interfaces import Backend


class PageLocked:
    """``memory``, the bytes of ``mapping`` (1-d uint8), page-locked until :meth:`close` or until this object goes.

    Takes exactly the mapping's bytes, where torch's own pinned memory is rounded up to a power of two and never given
    back to the system. Locking blocks for seconds where there are gigabytes. Raises
    :class:`~hwrl.errors.UnsupportedError` if the backend cannot lock it.
    """

    def __init__(self, mapping: mmap.mmap, *, backend: Backend) -> None:
        self.memory = torch.frombuffer(mapping, dtype=torch.uint8)
        backend.register_host_memory(self.memory)
        self._unlock = weakref.finalize(self, _unlock, self.memory, backend)

    def close(self) -> None:
        """Wait for the device and unlock; the memory itself lives as long as tensors of it. May be called again."""
        self._unlock()


def _unlock(memory: torch.Tensor, backend: Backend) -> None:
    backend.synchronize()  # copies may be under way
    backend.unregister_host_memory(memory)
