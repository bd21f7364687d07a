"""Lend host copies to readers in other threads: :class:`HostCopy`, :class:`HostCopies`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hwrl.memory.slabs import part_of

Range = tuple[int, int]
"""The first byte of a part of a slab, and the byte after its last."""


class Loan:
    """A lent range of a slab. An offload waits for the end of the loan before it overwrites a part of the range."""

    __slots__ = ("_due", "_loans")

    def __init__(self, loans: Loans, lent: Range) -> None:
        self._loans, self._due = loans, [lent]  # the first give_back takes it out
        loans.begin(lent)

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

    def __init__(self, slab: torch.Tensor, begin: int, like: torch.Tensor, loans: Loans, lent: Range) -> None:
        super().__init__(loans, lent)
        self._slab, self._begin, self._like = slab, begin, like

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, with the dtype, shape and strides of the offloaded tensor."""
        return part_of(self._slab, self._begin, self._like)


class HostCopies:
    """All host copies of an :class:`Offloader`, lent at once by :meth:`Offloader.lend_all`.

    A thread may take single copies from it with :meth:`lend` later, even after a load, and give the rest back. An
    element of ``slabs`` has a slab, the range in it of each storage's copy, by the storage's key, and its loans.
    """

    def __init__(self, slabs: Sequence[tuple[torch.Tensor, Mapping[int, Range], Loans]]) -> None:
        self._slabs = slabs
        self._slab_loans = [Loan(loans, (0, slab.numel())) for slab, _, loans in slabs]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether there is a copy of ``tensor`` (not a DTensor)."""
        storage = tensor.untyped_storage()._cdata
        return any(storage in ranges for _, ranges, _ in self._slabs)

    def lend(self, tensor: torch.Tensor) -> HostCopy | None:
        """Lend the copy of ``tensor`` (not a DTensor) on its own; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        for slab, ranges, loans in self._slabs:
            if (lent := ranges.get(storage)) is not None:
                begin = lent[0] + int(tensor.storage_offset()) * tensor.element_size()
                return HostCopy(slab, begin, tensor, loans, lent)
        return None

    def give_back(self) -> None:
        """Let offloads overwrite everything except copies lent on their own. Any thread may call it, repeatedly."""
        for loan in self._slab_loans:
            loan.give_back()


class Loans:
    """The readers of a slab, counted by the ranges that they read. Thread-safe.

    Ranges of different times may overlap: after an offload of smaller storages, later storages are at other places.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[Range] = Counter()

    def begin(self, lent: Range) -> None:
        """Count one more reader."""
        with self._changed:
            self._readers[lent] += 1

    def end(self, lent: Range) -> None:
        """Count one reader less."""
        with self._changed:
            self._readers[lent] -= 1
            if not self._readers[lent]:
                del self._readers[lent]
            self._changed.notify_all()

    def wait(self, start: int, end: int) -> None:
        """Block until no reader has a byte of the range."""
        with self._changed:
            # A copy of the keys: the garbage collector may end a loan meanwhile, in this thread.
            self._changed.wait_for(lambda: all(end <= lent[0] or lent[1] <= start for lent in list(self._readers)))
