"""Sources that several ranks read together: :class:`SharedReads`."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import torch

from hwrl.comm import Group
from hwrl.errors import CommError, ConfigError
from hwrl.interfaces import TrainEngine
from hwrl.weights.layout import NamedTensor
from hwrl.weights.source import Gatherers, SourceSelection, WeightSource, gathering_to

_MESSAGE_NBYTES = 256
_END: dict[str, Any] = {}


class RoundFollower(Protocol):
    """Another rank's part in a round of a link: :class:`~hwrl.weights.CoSender`."""

    def take_part(self, number: int, reading: FollowerRead) -> None:
        """Take part in the round of proposal ``number``, and exhaust ``reading``."""

    def release(self) -> None:
        """Close the connections and free the device memory."""


class SharedReads:
    """Sources that all ranks of ``group`` must read together, for example shards of one model.

    The first rank gives ``sources`` to a sender inside the context; a transfer may read them several times or not at
    all. The other ranks :meth:`follow` until the first rank leaves the context. ``group`` None means this rank alone.
    """

    def __init__(self, sources: Sequence[WeightSource], group: Group | None) -> None:
        self.group = group
        self._originals = sources
        self.sources = tuple(
            WeightSource(
                source.metadata, functools.partial(self.read, (number,)), shared=SourceSelection(self, (number,))
            )
            for number, source in enumerate(sources)
        )

    def follow(self, co_senders: Mapping[str, RoundFollower] | None = None) -> None:
        """Take part in each read of the first rank, until it leaves the context. Blocks.

        ``co_senders`` has this rank's part in the links with several senders, by the link's name. Raises their errors
        when the first rank has left the context, and at once if they did not read all: the ranks are then out of step.
        """
        failure: Exception | None = None
        while message := self._exchange(_END):
            if "release" in message:
                _of_link(message["release"], co_senders).release()
                continue
            reading = FollowerRead(self, tuple(message["reads"]))
            link, number = message["round"] or (None, 0)
            co_sender = None if link is None else _of_link(link, co_senders)
            try:
                if co_sender is None:
                    reading.finish()
                else:
                    co_sender.take_part(number, reading)
            except Exception as exc:
                if not reading.complete:
                    raise
                failure = failure or exc
        if failure is not None:
            raise failure

    def __enter__(self) -> SharedReads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._tell(_END)
        except CommError:
            if exc is None:  # else its cause is known already
                raise

    def release(self, link: str) -> None:
        """Let the co-senders of ``link`` close their connections and free their device memory."""
        self._tell({"release": link})

    def tensors(self, numbers: Sequence[int], gatherers: Gatherers | None) -> Iterator[NamedTensor]:
        """Yield this rank's tensors of the sources ``numbers``; every rank must exhaust this together."""
        for number in numbers:
            weights = iter(self._originals[number])
            while True:
                with gathering_to(gatherers):  # not around a yield: the caller's context would have it, too
                    pair = next(weights, None)
                if pair is None:
                    break
                yield pair

    @property
    def ranks(self) -> int:
        """How many ranks read together."""
        return 1 if self.group is None else self.group.size

    def read(
        self, numbers: Sequence[int], gatherers: Gatherers | None = None, in_round: tuple[str, int] | None = None
    ) -> Iterator[NamedTensor]:
        """Yield the first rank's tensors of the sources ``numbers``, while the other ranks follow.

        ``in_round`` is a link and the number of its proposal: the co-senders of the link take part.
        """
        self._tell({"reads": numbers, "round": in_round})
        weights = self.tensors(numbers, gatherers)
        try:
            for pair in weights:  # noqa: UP028 - delegating would close the iterator before it is drained
                yield pair
        finally:
            for _ in weights:  # the reader stopped early, and the other ranks gather to the end
                pass

    def _tell(self, message: dict[str, Any]) -> None:
        if self.group is not None and self.group.rank == 0:
            self._exchange(message)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Broadcast the first rank's message, _END at the end; return it. The first rank does not wait for others."""
        if self.group is None:
            return message
        text = json.dumps(message).encode()
        if len(text) > _MESSAGE_NBYTES:
            raise ConfigError(
                "the name of a weight link is too long",
                why=f"{message} has {len(text)} bytes, and ranks exchange {_MESSAGE_NBYTES}",
                fix="use a shorter name",
            )
        words = torch.frombuffer(bytearray(text.ljust(_MESSAGE_NBYTES)), dtype=torch.uint8)
        words = words.to(self.group.backend.device())
        self.group.broadcast(words, src=0)
        if self.group.rank == 0:
            return message
        received: dict[str, Any] = json.loads(bytes(words.tolist()))
        return received


class FollowerRead:
    """One read that the first rank has begun, seen from another rank. Exhaust it, or call :meth:`finish`."""

    def __init__(self, reads: SharedReads, numbers: Sequence[int]) -> None:
        assert reads.group is not None, "a rank alone follows nobody"
        self._reads, self._numbers = reads, numbers
        self.rank, self.ranks = reads.group.rank, reads.group.size
        self.complete = False
        """Whether all was read: this rank has sent and received all its shards."""

    def tensors(self, gatherers: Gatherers | None = None) -> Iterator[NamedTensor]:
        """Yield the tensors gathered to this rank."""
        yield from self._reads.tensors(self._numbers, gatherers)
        self.complete = True

    def finish(self) -> None:
        """Read all."""
        for _ in self.tensors():
            pass


def _of_link(link: str, co_senders: Mapping[str, RoundFollower] | None) -> RoundFollower:
    found = (co_senders or {}).get(link)
    if found is None:
        raise ConfigError(
            f"this rank has no co-sender of link {link!r}",
            why="the first rank sends with several senders, and the others must take part",
            fix="give follow() a CoSender for each link of the first rank's senders",
        )
    return found


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
