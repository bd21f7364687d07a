"""Page-locked buffers for reading tensors of the device: :class:`ReadBuffers`."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import torch

from hwrl.interfaces import Backend, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import alone, place_of


class ReadBuffers:
    """A few buffers of ``pool``, each with a side stream. They are kept from save to save.

    Timeline: ``open`` before each save, by the thread of the device; then any threads read.
    """

    def __init__(self, backend: Backend, pool: PinnedPool) -> None:
        self._backend, self._pool = backend, pool
        self._free: queue.SimpleQueue[tuple[torch.Tensor, StreamLike]] = queue.SimpleQueue()
        self._nbytes = self._count = 0

    def open(self, *, nbytes: int, count: int) -> None:
        """Provide at least ``count`` buffers of at least ``nbytes`` each. No thread may be reading now."""
        if nbytes <= self._nbytes and count <= self._count:
            return
        nbytes, count = max(nbytes, self._nbytes), max(count, self._count)
        self.close()  # the pool frees a small slab only when no tensor lies in it
        slab = self._pool.slab("ring", nbytes=nbytes * count)
        for start in range(0, nbytes * count, nbytes):
            self._free.put((slab[start : start + nbytes], self._backend.stream()))
        self._nbytes, self._count = nbytes, count

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a contiguous copy of ``tensor`` in a buffer. The buffer is free again after the block.

        Blocks until a buffer is free and the copy is complete; after the block begins, ``tensor`` is not read again.
        The operations filling ``tensor`` must be complete before the call.
        """
        buffer, stream = self._free.get()
        try:
            copy = alone(place_of(buffer, 0, tensor))
            with stream:  # also makes its device the current one of this thread
                copy.copy_(tensor, non_blocking=True)
            stream.synchronize()
            yield copy
        finally:
            self._free.put((buffer, stream))

    def close(self) -> None:
        """Drop the buffers. All must be free. The pool frees their memory."""
        while not self._free.empty():
            self._free.get()
        self._nbytes = self._count = 0
