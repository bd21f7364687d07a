"""Versions whose tensors are known only when they are read: they travel in chapters, each with a layout of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from hwrl.errors import LayoutMismatchError
from hwrl.weights.destination import Destination, DestinationFactory, TensorStream
from hwrl.weights.layout import NamedTensor, WeightLayout
from hwrl.weights.scatter import Scattered
from hwrl.weights.slabs import SlabLease


class Chapters:
    """The tensors of an iterator, ``nbytes`` bytes or a tensor more at a time. Used by a sender.

    Tied tensors are sent each for itself: those of different chapters are not alive together.
    """

    def __init__(self, weights: Iterator[NamedTensor], *, nbytes: int) -> None:
        self._weights, self._nbytes = weights, nbytes
        self._next: NamedTensor | None = None
        self._described: dict[str, torch.Tensor] = {}
        self.read = 0
        """How many chapters were read."""
        self._next = next(weights, None)
        self.first = self.take()
        """The tensors of chapter 0, until the next one is read."""

    @property
    def ended(self) -> bool:
        """Whether no tensor follows."""
        return self._next is None

    def take(self) -> list[NamedTensor]:
        """Read the next chapter; empty at the end. Raises LayoutMismatchError if a name comes twice."""
        taken: list[NamedTensor] = []
        nbytes, self.read = 0, self.read + 1
        while self._next is not None and nbytes < self._nbytes:
            name, tensor = self._next
            self._describe(name, tensor)
            taken.append(self._next)
            nbytes += tensor.nbytes
            self._next = next(self._weights, None)
        return taken

    def metadata(self) -> Iterator[NamedTensor]:
        """Yield the tensors read so far, on the meta device."""
        return iter(self._described.items())

    def _describe(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._described:
            raise LayoutMismatchError(
                "these weights cannot be sent", why=f"two tensors are called {name!r}", fix="give each its own name"
            )
        self._described[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def described(named: list[NamedTensor]) -> list[NamedTensor]:
    """Return the names with meta tensors, so that no ties are found."""
    return [(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")) for name, tensor in named]


class ChapteredPlace:
    """The place of a version in chapters. ``first`` is that of chapter 0; ``place`` makes further ones."""

    def __init__(self, layout: WeightLayout, first: Destination, place: DestinationFactory) -> None:
        self._places, self._place = [first], place
        self._first_nbytes = self.nbytes = layout.payload_nbytes
        """The bytes of the tensors of all chapters so far."""
        self.tensors: Mapping[str, torch.Tensor] = {}
        self.slots = first.slots

    def begin(self) -> None:
        """Prepare for a version: for its chapter 0."""
        del self._places[1:]
        self.nbytes, self.slots = self._first_nbytes, self._places[0].slots
        self._places[0].begin()

    def add(self, layout: WeightLayout) -> None:
        """Prepare for another chapter. Raises LayoutMismatchError if there is no place for a tensor."""
        first, last = self._places[0], self._places[-1]
        if isinstance(last, TensorStream | Scattered):
            last.release()  # there is one ring at a time
        self._places.append(first.further(layout) if isinstance(first, TensorStream) else self._place(layout))
        self._places[-1].begin()
        self.slots = self._places[-1].slots
        self.nbytes += layout.payload_nbytes

    def memory_for(self, index: int) -> SlabLease:
        """Return the memory to receive slab ``index`` of the newest chapter into."""
        return self._places[-1].memory_for(index)

    def store(self, lease: SlabLease) -> None:
        """Bring a received slab of the newest chapter to its tensors."""
        self._places[-1].store(lease)

    def finish(self) -> None:
        """Complete the version."""
        for place in reversed(self._places):  # the first one last: it speaks for all to a loader
            place.finish()
        self.tensors = {name: tensor for place in self._places for name, tensor in place.tensors.items()}

    def cancel(self) -> None:
        """Drop the version that was begun."""
        for place in reversed(self._places):
            place.cancel()
