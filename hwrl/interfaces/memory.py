"""How train engines report and share offloaded memory: :class:`Moved`, :class:`OffloadedState`.

:mod:`hwrl.memory` implements these interfaces for torch modules. An engine may bring its own implementation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch


class Transfer:
    """The copies of one offload or load. ``nbytes`` counts copied bytes; memory that was only freed does not count."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._events: list[tuple[Any, Any]] = []

    def add(self, *, nbytes: int, begin: Any, end: Any) -> None:
        """Count a copy of ``nbytes`` between two timing events of the backend."""
        self.nbytes += nbytes
        self._events.append((begin, end))

    @property
    def seconds(self) -> float:
        """The duration of the copies; exactly 0.0 if nothing was copied. Blocks until the copies are done."""
        for _, end in self._events:
            end.synchronize()
        return sum((float(begin.elapsed_time(end)) for begin, end in self._events), 0.0) / 1000

    def __repr__(self) -> str:
        return f"Transfer(nbytes={self.nbytes}, seconds={self.seconds:.6f})"


@dataclass
class Moved:
    """The transfers of one ``on_device`` block: ``load`` at its start, ``offload`` at its end (empty until then)."""

    load: Transfer = field(default_factory=Transfer)
    offload: Transfer = field(default_factory=Transfer)


class LentTensor(Protocol):
    """The host copy of one offloaded tensor, lent to a reader."""

    @property
    def tensor(self) -> torch.Tensor:
        """The copy, with the dtype, shape and strides of the offloaded tensor. Read it only; the lender owns it."""

    def give_back(self) -> None:
        """Let the lender overwrite the copy. Any thread may call it, more than once."""


class LentState(Protocol):
    """All offloaded tensors, lent together. A reader borrows single tensors from it, then gives the rest back."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether there is a host copy of ``tensor`` (not a DTensor)."""

    def lend(self, tensor: torch.Tensor) -> LentTensor | None:
        """Lend the copy of ``tensor`` (not a DTensor) on its own, until it is given back; None if there is no copy."""

    def give_back(self) -> None:
        """Let the lender overwrite every copy, except those lent on their own. Any thread may call it, repeatedly."""


class OffloadedState(Protocol):
    """Training state in host memory. A checkpoint reads it there while training continues."""

    def lend_all(self) -> LentState:
        """Lend every host copy at once; an offload waits before it overwrites a lent copy."""
