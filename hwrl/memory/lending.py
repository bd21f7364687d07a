"""Host copies that a reader in another thread needs for a while: :class:`HostCopy`, :class:`HostCopies`."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hwrl.memory.slabs import part_of


class Loan:
    """What lies at ``start`` of a slab, or all of it (None): an offload that would overwrite it waits for this."""

    __slots__ = ("_due", "_loans")

    def __init__(self, loans: Loans, start: int | None) -> None:
        self._loans, self._due = loans, [start]  # emptied by whoever gives back first
        loans.begin(start)

    def give_back(self) -> None:
        """Let the memory be overwritten. May be called again, from any thread; is called when this object goes."""
        with contextlib.suppress(IndexError):
            self._loans.end(self._due.pop())

    def __del__(self) -> None:
        self.give_back()


class HostCopy(Loan):
    """The host's copy of one offloaded tensor, lent by :meth:`Offloader.lend`.

    Its memory is the offloader's own, byte ``begin`` of ``slab``: only read it, until :meth:`give_back`.
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
    """All that an :class:`Offloader` has on the host, lent at once by :meth:`Offloader.lend_all`.

    So a thread may lend single copies of it later, whatever was loaded in the meantime, and give the rest back.
    ``slabs`` are its slabs, by each storage's address where its copy starts, and who reads them.
    """

    def __init__(self, slabs: Sequence[tuple[torch.Tensor, Mapping[int, int], Loans]]) -> None:
        self._slabs = slabs
        self._wholes = [Loan(loans, None) for _, _, loans in slabs]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether the copy of ``tensor``, no DTensor, is among them."""
        storage = tensor.untyped_storage()._cdata
        return any(storage in starts for _, starts, _ in self._slabs)

    def lend(self, tensor: torch.Tensor) -> HostCopy | None:
        """Lend the copy of ``tensor``, no DTensor, for itself; None if there is none."""
        storage = tensor.untyped_storage()._cdata
        for slab, starts, loans in self._slabs:
            if (start := starts.get(storage)) is not None:
                begin = start + int(tensor.storage_offset()) * tensor.element_size()
                return HostCopy(slab, begin, tensor, loans, start)
        return None

    def give_back(self) -> None:
        """Let all be overwritten but what was lent for itself. May be called again, from any thread."""
        for whole in self._wholes:
            whole.give_back()


class Loans:
    """Who reads which range of a slab; a range is named by where it starts, all of it by None. For any threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers: Counter[int | None] = Counter()

    def begin(self, start: int | None) -> None:
        """Count one reader more."""
        with self._changed:
            self._readers[start] += 1

    def end(self, start: int | None) -> None:
        """Count one reader less."""
        with self._changed:
            self._readers[start] -= 1
            self._changed.notify_all()

    def wait(self, start: int) -> None:
        """Block until nobody reads the range."""
        with self._changed:
            self._changed.wait_for(lambda: not self._readers[start] and not self._readers[None])
