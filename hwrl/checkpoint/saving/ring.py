"""A little page-locked memory through which a large state is read from the device: :class:`Ring`."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterator

import torch

from hwrl.interfaces import Backend, StreamLike
from hwrl.memory import PinnedPool
from hwrl.memory.slabs import alone, place_of


class Ring:
    """Places in ``pool`` for threads that read, each with a side stream of its own; kept from save to save.

    Timeline: ``open`` by the thread that has the device, before each save; then any threads read.
    """

    def __init__(self, backend: Backend, pool: PinnedPool) -> None:
        self._backend, self._pool = backend, pool
        self._free: queue.SimpleQueue[tuple[torch.Tensor, StreamLike]] = queue.SimpleQueue()
        self._nbytes = self._places = 0

    def open(self, *, nbytes: int, places: int) -> None:
        """Have at least ``places`` places of at least ``nbytes`` each, all free. Nothing is being read now."""
        if nbytes <= self._nbytes and places <= self._places:
            return
        nbytes, places = max(nbytes, self._nbytes), max(places, self._places)
        self.close()  # a slab that is too small is freed only when nothing lies in it
        slab = self._pool.slab("ring", nbytes=nbytes * places)
        for start in range(0, nbytes * places, nbytes):
            self._free.put((slab[start : start + nbytes], self._backend.stream()))
        self._nbytes, self._places = nbytes, places

    @contextlib.contextmanager
    def reading(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a contiguous copy of ``tensor`` in a place, which is free again after the block.

        What was queued to fill ``tensor`` is done. Waits for a place, and for the copy: nothing reads ``tensor`` then.
        """
        place, stream = self._free.get()
        try:
            copy = alone(place_of(place, 0, tensor))
            with stream:  # makes its device this thread's, too
                copy.copy_(tensor, non_blocking=True)
            stream.synchronize()
            yield copy
        finally:
            self._free.put((place, stream))

    def close(self) -> None:
        """Let go of the places, all free, which are the pool's to free."""
        while not self._free.empty():
            self._free.get()
        self._nbytes = self._places = 0
