"""Weight sources that several ranks read together: :class:`SharedReads`."""

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
    """What :meth:`SharedReads.follow` calls for each round of a link: a :class:`~hwrl.weights.CoSender`."""

    def take_part(self, number: int, reading: FollowerRead) -> None:
        """Take part in the round of proposal ``number``, and read ``reading`` to its end."""

    def release(self) -> None:
        """Close the connections and free the device memory."""


class SharedReads:
    """Sources that all ranks of ``group`` must read together, for example because each rank has shards of one model.

    Rank 0 passes one of ``sources`` to a sender, inside the context; a transfer may read it several times or not at
    all. The other ranks call :meth:`follow`, which returns when rank 0 leaves the context. ``group`` None means one
    rank.
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
        """Take part in each read that rank 0 begins, until it leaves the context. Blocks.

        ``co_senders`` maps the names of links with several senders to this rank's co-senders. Raises the first error of
        a co-sender when rank 0 has left the context. An error is raised at once if this rank did not read to the end,
        because the ranks are then out of step.
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
            if exc is None:  # otherwise exc is the cause
                raise

    def release(self, link: str) -> None:
        """Let the co-senders of ``link`` close their connections and free their device memory."""
        self._tell({"release": link})

    def tensors(self, numbers: Sequence[int], gatherers: Gatherers | None) -> Iterator[NamedTensor]:
        """Yield this rank's tensors of the sources ``numbers``. All ranks must read this to its end together."""
        for number in numbers:
            weights = iter(self._originals[number])
            while True:
                with gathering_to(gatherers):  # only around next: a yield would set it for the caller, too
                    pair = next(weights, None)
                if pair is None:
                    break
                yield pair

    @property
    def ranks(self) -> int:
        """The number of ranks that read together."""
        return 1 if self.group is None else self.group.size

    def read(
        self, numbers: Sequence[int], gatherers: Gatherers | None = None, in_round: tuple[str, int] | None = None
    ) -> Iterator[NamedTensor]:
        """Yield rank 0's tensors of the sources ``numbers``, while the other ranks follow.

        ``in_round`` is the name of a link and the number of its proposal, if co-senders take part.
        """
        self._tell({"reads": numbers, "round": in_round})
        weights = self.tensors(numbers, gatherers)
        try:
            for pair in weights:  # noqa: UP028 - delegating would close the iterator before it is drained
                yield pair
        finally:
            for _ in weights:  # if the reader stopped early, because the other ranks gather to the end
                pass

    def _tell(self, message: dict[str, Any]) -> None:
        if self.group is not None and self.group.rank == 0:
            self._exchange(message)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        """Broadcast rank 0's message and return it; _END is the last. Rank 0 does not wait for the others."""
        if self.group is None:
            return message
        text = json.dumps(message).encode()
        if len(text) > _MESSAGE_NBYTES:
            raise ConfigError(
                "the message about a read is too long",
                why=f"{message} has {len(text)} bytes, and the limit is {_MESSAGE_NBYTES}",
                fix="use a shorter name for the link, or fewer sources in one read",
            )
        words = torch.frombuffer(bytearray(text.ljust(_MESSAGE_NBYTES)), dtype=torch.uint8)
        words = words.to(self.group.backend.device())
        self.group.broadcast(words, src=0)
        if self.group.rank == 0:
            return message
        received: dict[str, Any] = json.loads(bytes(words.tolist()))
        return received


class FollowerRead:
    """A read that rank 0 has begun, seen from another rank. Read it to its end, or call :meth:`finish`."""

    def __init__(self, reads: SharedReads, numbers: Sequence[int]) -> None:
        assert reads.group is not None, "a single rank follows nobody"
        self._reads, self._numbers = reads, numbers
        self.rank, self.ranks = reads.group.rank, reads.group.size
        self.complete = False
        """Whether this rank has read to the end, so that it has sent and received all its shards."""

    def tensors(self, gatherers: Gatherers | None = None) -> Iterator[NamedTensor]:
        """Yield the tensors gathered to this rank."""
        yield from self._reads.tensors(self._numbers, gatherers)
        self.complete = True

    def finish(self) -> None:
        """Read to the end."""
        for _ in self.tensors():
            pass


def _of_link(link: str, co_senders: Mapping[str, RoundFollower] | None) -> RoundFollower:
    found = (co_senders or {}).get(link)
    if found is None:
        raise ConfigError(
            f"this rank has no co-sender of link {link!r}",
            why="rank 0 sends with several senders, and the other ranks must take part",
            fix="give follow() a CoSender for each link with several senders",
        )
    return found


class SharedWeights(SharedReads):
    """The weights of an engine as shared reads: ``model`` (whole, or an adapter's base) and ``adapter``."""

    model: WeightSource
    adapter: WeightSource

    def __init__(self, engine: TrainEngine, group: Group | None) -> None:
        model = WeightSource(engine.weights_metadata, engine.named_weights)
        super().__init__([model, WeightSource(engine.adapter_metadata, engine.named_adapter)], group)
        self.model, self.adapter = self.sources

    def __enter__(self) -> SharedWeights:
        return self
