"""Chapters: parts of a version whose tensors are known only when they are read. Each chapter has its own layout."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hwrl.errors import LayoutMismatchError
from hwrl.weights.layout import NamedTensor, checked_pair


class Chapters:
    """The tensors of an iterator, for a sender, in chapters of at least ``nbytes`` bytes each, except the last.

    Each name of a tied tensor is sent separately, because tensors of different chapters are not alive together.
    """

    def __init__(self, weights: Iterator[NamedTensor], *, nbytes: int) -> None:
        self._weights, self._nbytes = weights, nbytes
        self._next: NamedTensor | None = None
        self._described: dict[str, torch.Tensor] = {}
        self.read = 0
        """The number of chapters read so far."""
        self._next = next(weights, None)
        self.first = self.take()
        """The tensors of chapter 0. The sender empties this list before it reads the next chapter."""

    @property
    def ended(self) -> bool:
        """Whether all tensors were read."""
        return self._next is None

    def take(self) -> list[NamedTensor]:
        """Read and return the next chapter, empty at the end. Raises LayoutMismatchError if a name comes twice."""
        taken: list[NamedTensor] = []
        nbytes, self.read = 0, self.read + 1
        while self._next is not None and nbytes < self._nbytes:
            name, tensor = checked_pair(self._next)
            self._describe(name, tensor)
            taken.append((name, tensor))
            nbytes += tensor.nbytes
            self._next = next(self._weights, None)
        return taken

    def metadata(self) -> Iterator[NamedTensor]:
        """Return an iterator of the tensors read so far, on the meta device."""
        return iter(self._described.items())

    def _describe(self, name: str, tensor: torch.Tensor) -> None:
        if name in self._described:
            raise LayoutMismatchError(
                "these weights cannot be sent", why=f"two tensors are called {name!r}", fix="give each its own name"
            )
        self._described[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def on_meta(named: list[NamedTensor]) -> list[NamedTensor]:
    """Return the same names with separate meta tensors, so that no two of them count as tied."""
    return [(name, torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")) for name, tensor in named]
