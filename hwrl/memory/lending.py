"""Host copies that a reader in another thread needs for a while: :class:`HostCopy`."""

from __future__ import annotations

import threading
import weakref
from collections import Counter

import torch


class HostCopy:
    """The host's copy of one offloaded tensor, lent by :meth:`Offloader.lend`.

    Its memory is the offloader's own: only read it. Until :meth:`give_back`, or until this object goes, an offload that
    would overwrite it waits. The copy lies at byte ``begin`` of ``slab``; ``start`` is where its loan is counted.
    """

    def __init__(self, slab: torch.Tensor, begin: int, like: torch.Tensor, loans: Loans, start: int) -> None:
        self._slab, self._begin, self._like = slab, begin, like
        self.nbytes = like.nbytes
        loans.begin(start)
        self._end = weakref.finalize(self, loans.end, start)

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, with the dtype, shape and strides of the offloaded tensor."""
        return part_of(self._slab, self._begin, self._like)

    def give_back(self) -> None:
        """Let the memory be overwritten. May be called again, from any thread."""
        self._end()


class Loans:
    """Who reads which range of a slab; a range is named by where it starts. For any number of threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[int] = Counter()

    def begin(self, start: int) -> None:
        """Count one reader more."""
        with self._changed:
            self._readers[start] += 1

    def end(self, start: int) -> None:
        """Count one reader less."""
        with self._changed:
            self._readers[start] -= 1
            self._changed.notify_all()

    def wait(self, start: int) -> None:
        """Block until nobody reads the range."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[start])


def part_of(slab: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    """Return a tensor over ``slab`` (1-d uint8) from byte ``start``, with ``like``'s dtype, shape and strides.

    Its storage is a part of the slab's and holds its elements only, because torch's checkpoint writer clones a tensor
    that shares a larger one, and keeps the clones until its file is complete. It keeps the slab's memory alive.
    """
    extent = 1 + sum((size - 1) * stride for size, stride in zip(like.shape, like.stride(), strict=True))
    first = slab.storage_offset() + start
    storage = slab.untyped_storage()[first : first + (extent * like.element_size() if like.numel() else 0)]
    return torch.empty(0, dtype=like.dtype).set_(storage, 0, like.shape, like.stride())
