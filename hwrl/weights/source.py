"""Named tensors that are made while they are read, as often as a transfer must read them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

NamedTensor: TypeAlias = "tuple[str, torch.Tensor]"


@dataclass(frozen=True)
class WeightSource:
    """What :meth:`~hwrl.weights.WeightSender.publish` reads, more than once if it must; ``a + b`` reads both.

    ``metadata`` yields names with tensors on the meta device, ``read`` the tensors themselves.
    """

    metadata: Callable[[], Iterator[NamedTensor]]
    read: Callable[[], Iterator[NamedTensor]]

    def __iter__(self) -> Iterator[NamedTensor]:
        return self.read()

    def __add__(self, other: WeightSource) -> WeightSource:
        return WeightSource(lambda: _chained(self.metadata, other.metadata), lambda: _chained(self.read, other.read))


def _chained(*reads: Callable[[], Iterator[NamedTensor]]) -> Iterator[NamedTensor]:
    for read in reads:
        yield from read()
