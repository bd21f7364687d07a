"""Page-locked host buffers, for reading tensors from the device: :class:`ReadBuffers`."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import torch

from hwrl.interfaces import Backend, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import alone, place_of


class ReadBuffers:
    """A few page-locked buffers from ``pool``, each with a side stream. They are kept from one save to the next.

    Timeline: before each save, the thread that uses the device calls ``open``. Then any thread may read.
    """

    def __init__(self, backend: Backend, pool: PinnedPool) -> None:
        self._backend, self._pool = backend, pool
        self._free: queue.SimpleQueue[tuple[torch.Tensor, StreamLike]] = queue.SimpleQueue()
        self._nbytes = self._count = 0

    def open(self, *, nbytes: int, count: int) -> None:
        """Provide at least ``count`` buffers of at least ``nbytes`` each. No thread may be reading at this time."""
        if nbytes <= self._nbytes and count <= self._count:
            return
        nbytes, count = max(nbytes, self._nbytes), max(count, self._count)
        self.close()  # the pool can free a slab that is too small only when no tensor uses it
        slab = self._pool.slab("ring", nbytes=nbytes * count)
        for start in range(0, nbytes * count, nbytes):
            self._free.put((slab[start : start + nbytes], self._backend.stream()))
        self._nbytes, self._count = nbytes, count

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

    def close(self) -> None:
        """Give the buffers up, so that the pool can free their memory. None may be in use."""
        while not self._free.empty():
            self._free.get()
        self._nbytes = self._count = 0
