"""Lend host copies to readers in other threads: :class:`HostCopy`, :class:`HostCopies`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hwrl.memory.slabs import part_of


class Loan:
    """A lent range of a slab, named by its ``start``; None is the whole slab.

    An offload waits for the end of the loan before it overwrites the range.
    """

    __slots__ = ("_due", "_loans")

    def __init__(self, loans: Loans, start: int | None) -> None:
        self._loans, self._due = loans, [start]  # the first give_back takes it out
        loans.begin(start)

    def give_back(self) -> None:
        """Let offloads overwrite the range. Any thread may call it, repeatedly; deleting the object calls it, too."""
        with contextlib.suppress(IndexError):
            self._loans.end(self._due.pop())

    def __del__(self) -> None:
        self.give_back()


class HostCopy(Loan):
    """The host copy of one offloaded tensor, lent by :meth:`Offloader.lend`.

    Its memory belongs to the offloader: only read it, and only until :meth:`give_back`. It starts at byte ``begin`` of
    ``slab``.
    """

    __slots__ = ("_begin", "_like", "_slab")

    def __init__(self, slab: torch.Tensor, begin: int, like: torch.Tensor, loans: Loans, start: int) -> None:
        super().__init__(loans, start)
        self._slab, self._begin, self._like = slab, begin, like

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, with the dtype, shape and strides of the offloaded tensor."""
        return part_of(self._slab, self._begin, self._like)


class HostCopies:
    """All host copies of an :class:`Offloader`, lent at once by :meth:`Offloader.lend_all`.

    A thread may take single copies from it with :meth:`lend` later, even after a load, and give the rest back. An
    element of ``slabs`` has a slab, the start in it of each storage's copy, by the storage's key, and its loans.
    """

    def __init__(self, slabs: Sequence[tuple[torch.Tensor, Mapping[int, int], Loans]]) -> None:
        self._slabs = slabs
        self._slab_loans = [Loan(loans, None) for _, _, loans in slabs]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether there is a copy of ``tensor`` (not a DTensor)."""
        storage = tensor.untyped_storage()._cdata
        return any(storage in starts for _, starts, _ in self._slabs)

    def lend(self, tensor: torch.Tensor) -> HostCopy | None:
        """Lend the copy of ``tensor`` (not a DTensor) on its own; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        for slab, starts, loans in self._slabs:
            if (start := starts.get(storage)) is not None:
                begin = start + int(tensor.storage_offset()) * tensor.element_size()
                return HostCopy(slab, begin, tensor, loans, start)
        return None

    def give_back(self) -> None:
        """Let offloads overwrite everything except copies lent on their own. Any thread may call it, repeatedly."""
        for loan in self._slab_loans:
            loan.give_back()


class Loans:
    """The readers of a slab's ranges, counted by the start of the range; None is the whole slab. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[int | None] = Counter()

    def begin(self, start: int | None) -> None:
        """Count one more reader."""
        with self._changed:
            self._readers[start] += 1

    def end(self, start: int | None) -> None:
        """Count one reader less."""
        with self._changed:
            self._readers[start] -= 1
            self._changed.notify_all()

    def wait(self, start: int) -> None:
        """Block until the range has no readers."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[start] and not self._readers[None])
