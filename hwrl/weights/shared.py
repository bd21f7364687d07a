"""Collective reads: the first rank reads sources as often as it needs, and the other ranks take part."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch

from hwrl.comm import Group
from hwrl.interfaces import TrainEngine
from hwrl.weights.layout import NamedTensor
from hwrl.weights.source import WeightSource

_END = -1


class SharedReads:
    """Sources that all ranks of ``group`` must read together, for example shards of one model.

    The first rank gives ``sources`` to a sender inside the context; a transfer may read them several times or not at
    all. The other ranks :meth:`follow` until the first rank leaves the context. ``group`` None means this rank alone.
    """

    def __init__(self, sources: Sequence[WeightSource], group: Group | None) -> None:
        self._group = group
        self._originals = sources
        self.sources = tuple(
            WeightSource(source.metadata, functools.partial(self._read, number))
            for number, source in enumerate(sources)
        )

    def follow(self) -> None:
        """Take part in each read of the first rank, until it leaves the context. Blocks."""
        while (number := self._announce(_END)) != _END:
            for _ in self._originals[number]:
                pass

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._group is None or self._group.rank == 0:
            self._announce(_END)

    def _read(self, number: int) -> Iterator[NamedTensor]:
        self._announce(number)
        weights = iter(self._originals[number])
        try:
            for pair in weights:  # noqa: UP028 - delegating would close the iterator before it is drained
                yield pair
        finally:
            for _ in weights:  # the reader stopped early, and the other ranks gather to the end
                pass

    def _announce(self, number: int) -> int:
        """Broadcast the number of the source that the first rank reads next, _END if none; return its number."""
        if self._group is None:
            return number
        word = torch.tensor([number], dtype=torch.int32, device=self._group.backend.device())
        self._group.broadcast(word, src=0)
        return int(word.item())


class SharedWeights(SharedReads):
    """An engine's weights as shared reads: ``model``, the whole model or an adapter's base, and the ``adapter``."""

    model: WeightSource
    adapter: WeightSource

    def __init__(self, engine: TrainEngine, group: Group | None) -> None:
        model = WeightSource(engine.weights_metadata, engine.named_weights)
        super().__init__([model, WeightSource(engine.adapter_metadata, engine.named_adapter)], group)
        self.model, self.adapter = self.sources

    def __enter__(self) -> SharedWeights:
        return self
