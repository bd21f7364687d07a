"""The messages of a weight link: what they say, and how they are written and read.

:class:`~hwrl.weights.control.ControlChannel` carries them. Reading checks every field, because any process with a
connection to the store may have written it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar, get_type_hints

from hwrl.errors import CommError, TransferFailedError, in_one_line

if TYPE_CHECKING:
    from hwrl.weights.transport import Transport

Metadata = Mapping[str, str | int | float]
_Fields = TypeVar("_Fields")


class VoteKind(StrEnum):
    """How the part of a receiver, or of a sending rank above 0, in a transfer ended."""

    WHOLE = "whole"
    CORRUPT = "corrupt"
    """Other bytes arrived than were sent."""
    TORN = "torn"
    """The transfer broke."""
    FAILED = "failed"
    """The process raised an error of its own, in its loader or for lack of memory. The transfer broke, too."""

    @property
    def is_broken(self) -> bool:
        """Whether the process has ended its part of the transfer before the last byte."""
        return self in (VoteKind.TORN, VoteKind.FAILED)


class DecisionKind(StrEnum):
    """The outcome of a proposal. The sender may replace AGAIN by GIVEN_UP later; the others are final."""

    COMMITTED = "committed"
    AGAIN = "again"
    """Aborted. Another proposal of the version follows if receivers are left, or the sender gives up."""
    GIVEN_UP = "given up"
    """Aborted. No other attempt follows, but the caller may publish the version again."""


@dataclass(frozen=True)
class Message:
    """A kind, and ``detail``, a human-readable reason."""

    kind: StrEnum
    detail: str = ""
    name: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)

    def to_json(self) -> str:
        """Return the message as text for :meth:`read`."""
        return json.dumps([self.kind, self.detail])

    @classmethod
    def read(cls, text: bytes) -> Self:
        """Read a message; raises TransferFailedError if it is malformed."""
        try:
            kind, detail = json.loads(text)
            kinds = _types_of(cls)["kind"]  # type: ignore[arg-type]  # mypy takes a dataclass type for unhashable
            return cls(kinds(kind), str(detail))
        except (ValueError, TypeError, RecursionError) as exc:
            raise _unreadable(cls.name, text) from exc


@dataclass(frozen=True)
class Vote(Message):
    """A receiver's vote."""

    kind: VoteKind
    name = "a vote"

    @classmethod
    def of_error(cls, error: BaseException) -> Vote:
        """Return the vote of a receiver whose part ended with ``error``."""
        if isinstance(error, CommError):
            return cls(VoteKind.TORN, error.what)
        kind = VoteKind.TORN if isinstance(error, TransferFailedError) else VoteKind.FAILED
        return cls(kind, in_one_line(error))


@dataclass(frozen=True)
class Decision(Message):
    """The sender's decision about a proposal."""

    kind: DecisionKind
    name = "a decision"


@dataclass(frozen=True)
class Abandonment:
    """A ``version`` given up by sender ``epoch``, for receivers ``to``: its last round, if any, was without them.

    ``number`` grows with each abandonment on the link.
    """

    number: int = 0
    epoch: int = 0
    version: int = 0
    why: str = ""
    to: tuple[int, ...] = ()

    @classmethod
    def read(cls, text: bytes) -> Abandonment:
        """Read an abandonment; raises TransferFailedError if it is malformed."""
        try:
            return _read_fields(cls, json.loads(text))
        except (ValueError, TypeError, RecursionError) as exc:
            raise _unreadable("an abandonment", text) from exc


SLACK_S = 10.0
"""How much longer receivers wait than the sender: time for its own work between two waits, on a busy machine."""
LONGEST_TIMEOUT_S = 1e9
"""A longer time overflows in libraries that get it."""


@dataclass(frozen=True)
class Limits:
    """How long the two ends of a link wait for each other, in seconds; most limits follow from ``timeout_s``.

    A healthy receiver must not give up while the sender still waits for one that hangs.
    """

    timeout_s: float
    patience_s: float = 1.0
    """The longest wait for new receivers, once another member has committed a version of this sender."""

    @property
    def votes_s(self) -> float:
        """The part of ``timeout_s`` kept for the votes after a transfer broke.

        A live receiver reports a broken transfer within milliseconds; the rest is for a busy machine.
        """
        return min(5.0, self.timeout_s / 3)

    @property
    def wire_s(self) -> float:
        """The limit of each collective, and of the sender's wait for each window. The rest is for the votes."""
        return self.timeout_s - self.votes_s

    @property
    def start_s(self) -> float:
        """How long a receiver waits for START: the sender waits ``timeout_s`` for the other receivers."""
        return self.timeout_s + SLACK_S

    @property
    def decision_s(self) -> float:
        """How long a receiver waits for the decision: the sender waits for the transfer, then for the votes."""
        return 2 * self.timeout_s + SLACK_S


@dataclass(frozen=True)
class TransportPayload:
    """The part of a proposal that only its transport reads.

    Each transport has its own frozen dataclass, whose fields are int, float, str or tuple[int, ...].
    """


@dataclass(frozen=True)
class Proposal:
    """A version on offer to the receivers. It begins the first phase of the commit.

    ``number`` grows with every proposal of a sender, and a later sender's are larger. ``to`` has the join numbers of
    the receivers, in rank order from 1; it is empty if the transport keeps versions. ``timeout_s`` is the sender's, and
    receivers derive their own limits from it. ``last_stored_number`` is the number of the last proposal whose version
    was stored completely; 0 if there is none, or if the transport keeps no versions. ``payload`` is an object of its
    transport's class of :class:`TransportPayload`. ``senders`` ranks share the buckets
    (:class:`~hwrl.weights.shares.Shares`).
    """

    number: int
    epoch: int
    version: int
    transport: str
    layout_hash: str
    to: tuple[int, ...]
    timeout_s: float
    last_stored_number: int
    metadata: dict[str, str | int | float]
    payload: Any
    senders: int = 1

    @classmethod
    def read(cls, text: bytes, transports: Mapping[str, Transport]) -> Proposal:
        """Read a proposal. Raises TransferFailedError if it is malformed or its transport is not in ``transports``."""
        try:
            found = json.loads(text)
            if isinstance(found["transport"], str) and found["transport"] not in transports:
                raise _unknown_transport(found["transport"][:80], transports)
            payload = _read_fields(transports[found["transport"]].payload, found["payload"])
            proposal = _read_fields(cls, found, payload=payload)
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as exc:
            raise _unreadable("a proposal", text) from exc
        if not 0 < proposal.timeout_s <= LONGEST_TIMEOUT_S or proposal.senders < 1:
            raise _unreadable("a proposal", text)
        return proposal

    @functools.cached_property
    def limits(self) -> Limits:
        """How long a receiver waits for the sender."""
        return Limits(self.timeout_s)


def checked_metadata(metadata: Metadata | None) -> dict[str, str | int | float]:
    """Return a copy of ``metadata``; raises TransferFailedError if it has more than strings and numbers."""
    found = dict(metadata or {})
    if not _is_metadata(found):
        raise TransferFailedError(
            "metadata cannot be sent",
            why=f"{found!r} has more than strings and numbers",
            fix="send strings and numbers",
        )
    return found


def _read_fields(fields: type[_Fields], found: Any, **ready: Any) -> _Fields:
    """Make the dataclass ``fields`` from the JSON object ``found``, taking the fields in ``ready`` from there.

    Raises TypeError or ValueError if a field is missing, unknown or of another type.
    """
    types = _types_of(fields)  # type: ignore[arg-type]  # mypy takes a dataclass type for unhashable
    if not isinstance(found, dict) or found.keys() != types.keys():
        raise ValueError(f"the fields are not {', '.join(types)}")
    return fields(**{name: ready[name] if name in ready else _value(types[name], found[name]) for name in types})


@functools.cache  # resolving the annotations takes 0.1 ms, and every transfer reads a proposal
def _types_of(fields: type) -> dict[str, Any]:
    return get_type_hints(fields)


def _value(wanted: Any, found: Any) -> Any:
    if wanted == tuple[int, ...] and isinstance(found, list):
        return tuple(_value(int, item) for item in found)
    if wanted is float and isinstance(found, int | float) and math.isfinite(found):
        return float(found)
    if wanted in (int, str) and type(found) is wanted:
        return found
    if isinstance(found, dict) and wanted == dict[str, str | int | float] and _is_metadata(found):
        return found
    raise TypeError(f"{found!r} is not a {wanted}")


def _is_metadata(found: dict[Any, Any]) -> bool:
    return all(isinstance(key, str) and isinstance(value, str | int | float) for key, value in found.items())


def _unknown_transport(name: str, known: Collection[str]) -> TransferFailedError:
    return TransferFailedError(
        f"this process does not know the transport {name!r}",
        why=f"the sender uses it, and this process knows {', '.join(known)}",
        fix=f"install its package here, and pass transports=hwrl.weights.with_transport({name!r})",
    )


def _unreadable(name: str, text: bytes) -> TransferFailedError:
    return TransferFailedError(
        f"{name} cannot be read", why=f"the store holds {text[:80]!r}", fix="use the same hwrl on both sides"
    )
