"""The control channel of a weight link: small typed JSON messages under the keys of a store.

Each message of a round has one writer. The counters and the newest proposal's number have several, and change by one
atomic operation. A join request is several writes; :mod:`hwrl.weights.membership` handles incomplete ones.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, TypeVar, get_type_hints

from hwrl.comm import PrefixStore, Store, await_keys, clone_store
from hwrl.errors import CommError, LayoutMismatchError, ReceiverExcludedError, TransferFailedError, in_one_line
from hwrl.weights.layout import WeightLayout
from hwrl.weights.store_keys import StoreKeys

Metadata = Mapping[str, str | int | float]
_KindT = TypeVar("_KindT", bound=StrEnum)
_Fields = TypeVar("_Fields")


class Note(StrEnum):
    """The kinds of messages. A key begins with the kind; mostly the number of a proposal or member follows."""

    LAYOUT = "layout"
    PROPOSAL = "proposal"
    READY = "ready"
    START = "start"
    VOTE = "vote"
    DECISION = "decision"
    TRANSPORT = "transport"
    JOIN = "join"
    EXCLUDED = "excluded"
    ABANDONED = "abandoned"


class Start(StrEnum):
    """The sender's answer to READY, when all receivers have written it or the sender stops waiting."""

    GO = "go"
    """All receivers are ready, and the transfer begins."""
    WITHDRAWN = "withdrawn"
    """Some are not ready. Another proposal follows without them, if receivers are left."""


class VoteKind(StrEnum):
    """A receiver's view of a transfer."""

    WHOLE = "whole"
    CORRUPT = "corrupt"
    """Other bytes arrived than were sent."""
    TORN = "torn"
    """The transfer broke."""
    FAILED = "failed"
    """The receiver raised an error of its own, in its loader or for lack of memory. The transfer broke, too."""

    @property
    def is_broken(self) -> bool:
        """Whether the receiver has ended its part of the transfer before the last byte."""
        return self in (VoteKind.TORN, VoteKind.FAILED)


class DecisionKind(StrEnum):
    """The outcome of a proposal. The sender may replace AGAIN by GIVEN_UP later; the others are final."""

    COMMITTED = "committed"
    AGAIN = "again"
    """Aborted. Another proposal of the version follows if receivers are left, or the sender gives up."""
    GIVEN_UP = "given up"
    """Aborted. No other attempt follows, but the caller may publish the version again."""


@dataclass(frozen=True)
class Vote:
    """A receiver's vote; ``detail`` is a human-readable reason."""

    kind: VoteKind
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}" if self.detail else str(self.kind)

    @classmethod
    def of_error(cls, error: BaseException) -> Vote:
        """Return the vote of a receiver whose part ended with ``error``."""
        if isinstance(error, CommError):
            return cls(VoteKind.TORN, error.what)
        kind = VoteKind.TORN if isinstance(error, TransferFailedError) else VoteKind.FAILED
        return cls(kind, in_one_line(error))

    @classmethod
    def read(cls, text: bytes) -> Vote:
        """Read a vote; raises TransferFailedError if it is malformed."""
        return cls(*read_message("a vote", text, VoteKind))


@dataclass(frozen=True)
class Decision:
    """The sender's decision about a proposal; ``detail`` is a human-readable reason."""

    kind: DecisionKind
    detail: str = ""

    @classmethod
    def read(cls, text: bytes) -> Decision:
        """Read a decision; raises TransferFailedError if it is malformed."""
        return cls(*read_message("a decision", text, DecisionKind))


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


@dataclass(frozen=True)
class Limits:
    """How long the two ends of a link wait for each other, in seconds; most limits follow from ``timeout_s``.

    A healthy receiver must not give up while the sender still waits for one that hangs.
    """

    timeout_s: float
    slack_s: float = 10.0
    """Time for the sender's own work between two waits, on a busy machine."""
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
        return self.timeout_s + self.slack_s

    @property
    def decision_s(self) -> float:
        """How long a receiver waits for the decision: the sender waits for the transfer, then for the votes."""
        return 2 * self.timeout_s + self.slack_s


@dataclass(frozen=True)
class TransportPayload:
    """The part of a proposal that only its transport reads.

    Each transport has its own frozen dataclass, whose fields are int, float, str or tuple[int, ...].
    """


@dataclass(frozen=True)
class Proposal:
    """A version on offer to the receivers. It begins the first phase of the commit.

    ``number`` grows with every proposal of every sender of the link. ``to`` has the join numbers of the receivers, in
    rank order from 1; it is empty if the transport keeps versions. ``timeout_s`` is the sender's, and receivers derive
    their own limits from it. ``last_stored_number`` is the number of the last proposal whose version was stored
    completely; 0 if there is none, or if the transport keeps no versions. ``senders`` ranks share the slabs
    (:class:`~hwrl.weights.shares.Shares`). ``chapters`` is 1 if chapters with other layouts may follow, because the
    sender reads an iterator (:class:`~hwrl.weights.chapters.Chapters`), else 0.
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
    payload: TransportPayload
    senders: int = 1
    chapters: int = 0

    @classmethod
    def read(cls, text: bytes, payloads: Mapping[str, type[TransportPayload]]) -> Proposal:
        """Read a proposal. Raises TransferFailedError if it is malformed or its transport is not in ``payloads``."""
        try:
            found = json.loads(text)
            if isinstance(found["transport"], str) and found["transport"] not in payloads:
                raise _unknown_transport(found["transport"][:80], payloads)
            payload = _read_fields(payloads[found["transport"]], found["payload"])
            proposal = _read_fields(cls, found, payload=payload)
        except (ValueError, TypeError, KeyError, RecursionError) as exc:
            raise _unreadable("a proposal", text) from exc
        if proposal.timeout_s <= 0 or proposal.senders < 1:
            raise _unreadable("a proposal", text)
        return proposal


class ControlChannel:
    """The messages of the link ``name`` in ``store``. ``payloads`` maps each known transport to its payload class."""

    def __init__(self, store: Store, *, name: str, payloads: Mapping[str, type[TransportPayload]]) -> None:
        # Its own connection: a client that waits blocks other threads, and making a process group waits.
        self.store: Store = PrefixStore(f"weights/{name}", clone_store(store))
        self.name = name
        self._keys = StoreKeys(self.store)
        self._payloads = payloads
        self.shown: Proposal | None = None
        """The last proposal that this end has made visible to receivers."""

    # -- the sender writes --------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Register a new sender and return its number, the epoch. This deposes all earlier senders."""
        return self._keys.add("epochs", 1)

    def check_epoch(self, epoch: int) -> None:
        """Raise TransferFailedError if the sender of ``epoch`` is deposed."""
        newest = self.epoch()
        if newest != epoch:
            raise TransferFailedError(
                f"this sender of {self.name!r} is deposed",
                why=f"it is sender {epoch}, and sender {newest} has taken over",
                fix="end this process; two trainers must not share a link's name",
            )

    def put_layout(self, layout: WeightLayout) -> None:
        """Store ``layout`` under its hash."""
        self._keys.set(_key(Note.LAYOUT, layout.hash), layout.to_json())

    def reserve_number(self) -> int:
        """Return the number of a new proposal. No other sender gets it, not even a deposed one still running."""
        return self._keys.add("proposal numbers", 1)

    def propose(self, proposal: Proposal) -> None:
        """Make ``proposal`` visible to the receivers; they see all of it or nothing."""
        self._keys.set(_key(Note.PROPOSAL, proposal.number), json.dumps(asdict(proposal)))
        self._keys.raise_to("newest proposal", proposal.number)
        self.shown = proposal

    def start(self, proposal: Proposal, start: Start) -> None:
        """Tell the receivers to begin the transfer, or that the proposal is withdrawn."""
        self._keys.set(_key(Note.START, proposal.number), start)

    def decide(self, proposal: Proposal, decision: Decision) -> None:
        """Tell the receivers how the proposal ended. Written once, except that :meth:`give_up` replaces AGAIN."""
        self._keys.set(_key(Note.DECISION, proposal.number), write_message(decision.kind, decision.detail))

    def give_up(self, proposal: Proposal, why: str) -> None:
        """Tell the receivers that no proposal follows. Does nothing if ``proposal`` was committed or never visible."""
        if self.newest() < proposal.number:
            return
        decision = self.decision(proposal)
        if decision is None or decision.kind is DecisionKind.AGAIN:
            self.decide(proposal, Decision(DecisionKind.GIVEN_UP, why))

    def abandon(self, epoch: int, version: int, why: str, *, to: Sequence[int]) -> None:
        """Tell receivers ``to``, without a part in the last round, that the sender of ``epoch`` gave up ``version``."""
        found = Abandonment(self._keys.add("abandonments", 1), epoch, version, why, tuple(to))
        self._keys.set(Note.ABANDONED, json.dumps(asdict(found)))

    def exclude(self, member: int, why: str) -> None:
        """Exclude a receiver, which gets the reason ``why``."""
        self._keys.set(_key(Note.EXCLUDED, member), why)
        self._keys.delete(_key(Note.JOIN, member))

    def forget(self, proposal: Proposal) -> None:
        """Delete the messages about a proposal. No receiver may still be waiting for one."""
        keys = [_key(note, proposal.number) for note in (Note.START, Note.DECISION, Note.PROPOSAL)]
        keys += [_key(note, proposal.number, member) for note in (Note.READY, Note.VOTE) for member in proposal.to]
        for key in keys:
            self._keys.delete(key)

    # -- the sender reads ---------------------------------------------------------------------------------------

    def join_counts(self) -> tuple[int, int]:
        """Return how many join requests are complete, and the newest join number."""
        return self._keys.add("joins", 0), self._keys.add("numbers", 0)

    def replica(self, member: int) -> str | None:
        """Return the replica name of receiver ``member``; None if it has left, or its join request is incomplete."""
        found = self._keys.get(_key(Note.JOIN, member))
        return None if found is None else found.decode(errors="replace")

    def missing(self, proposal: Proposal, note: Note, members: Collection[int], *, timeout_s: float) -> list[int]:
        """Wait until all ``members`` have written ``note``; return those still missing after ``timeout_s``."""
        return self._wait({_key(note, proposal.number, member): member for member in members}, timeout_s)

    def vote(self, proposal: Proposal, member: int) -> Vote | None:
        """Return a receiver's vote, or None if it has not voted."""
        found = self._keys.get(_key(Note.VOTE, proposal.number, member))
        return None if found is None else Vote.read(found)

    # -- the receivers write ------------------------------------------------------------------------------------

    def join(self, *replicas: str) -> tuple[int, ...]:
        """Request versions for receivers called ``replicas``; return their join numbers.

        The requests become complete together, so the sender usually sees all of them at once.
        """
        last = self._keys.add("numbers", len(replicas))
        numbers = tuple(range(last - len(replicas) + 1, last + 1))
        for number, replica in zip(numbers, replicas, strict=True):
            self._keys.set(_key(Note.JOIN, number), replica)
        self._keys.add("joins", len(replicas))
        return numbers

    def leave(self, member: int) -> None:
        """Withdraw the join request. Its number is not used again."""
        for note in (Note.JOIN, Note.EXCLUDED):
            self._keys.delete(_key(note, member))

    def report_ready(self, proposal: Proposal, member: int) -> None:
        """Tell the sender that receiver ``member`` is ready for the transfer."""
        self._keys.set(_key(Note.READY, proposal.number, member), "")

    def cast_vote(self, proposal: Proposal, member: int, vote: Vote) -> None:
        """Write the vote of receiver ``member``."""
        self._keys.set(_key(Note.VOTE, proposal.number, member), write_message(vote.kind, vote.detail))

    # -- the receivers read -------------------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the newest proposal's number, 0 before the first. One short round trip."""
        return self._keys.number("newest proposal")

    def epoch(self) -> int:
        """Return the newest sender's number, 0 before the first."""
        return self._keys.add("epochs", 0)

    def proposal(self, number: int) -> Proposal | None:
        """Return proposal ``number``, or None if its messages were deleted."""
        text = self._keys.get(_key(Note.PROPOSAL, number))
        return None if text is None else Proposal.read(text, self._payloads)

    def wait_for_proposal(self, number: int, *, timeout_s: float) -> None:
        """Block until proposal ``number`` exists or ``timeout_s`` has passed."""
        await_keys(self.store, [_key(Note.PROPOSAL, number)], timeout_s=timeout_s)

    def wait_for_start(self, proposal: Proposal, *, timeout_s: float) -> Start | None:
        """Block until the sender has answered READY; return None after ``timeout_s``."""
        text = self._wait_and_get(_key(Note.START, proposal.number), timeout_s)
        return None if text is None else _read_kind("the start", text, Start)

    def wait_for_decision(self, proposal: Proposal, *, timeout_s: float) -> Decision | None:
        """Block until the sender has decided; return None after ``timeout_s``."""
        text = self._wait_and_get(_key(Note.DECISION, proposal.number), timeout_s)
        return None if text is None else Decision.read(text)

    def decision(self, proposal: Proposal) -> Decision | None:
        """Return the sender's decision, or None if there is none yet."""
        text = self._keys.get(_key(Note.DECISION, proposal.number))
        return None if text is None else Decision.read(text)

    def abandonment(self) -> Abandonment:
        """Return the newest abandonment; its number is 0 if there is none."""
        text = self._keys.get(Note.ABANDONED)
        return Abandonment() if text is None else Abandonment.read(text)

    def check_member(self, member: int, replica: str) -> None:
        """Raise ReceiverExcludedError if receiver ``member`` was excluded."""
        why = self._keys.get(_key(Note.EXCLUDED, member))
        if why is not None:
            raise ReceiverExcludedError(
                f"receiver {replica!r} was excluded from {self.name!r}",
                why=why.decode(errors="replace"),
                fix="call join() to get the next version",
            )

    def layout(self, proposal: Proposal) -> WeightLayout:
        """Return the proposal's layout. Raises LayoutMismatchError if it is malformed or has another hash."""
        layout = WeightLayout.from_json(self._keys.get(_key(Note.LAYOUT, proposal.layout_hash)) or b"")
        if layout.hash != proposal.layout_hash:
            raise LayoutMismatchError(
                "this is not the layout of the proposal", why="the hashes differ", fix="use the same hwrl on both sides"
            )
        return layout

    # -- further notes of a round: keys of hwrl (notes.py) begin with a letter, keys of a transport with a digit --

    def put_transport_note(self, proposal: Proposal, key: str, text: str, *, member: int | None = None) -> None:
        """Write a note."""
        self._keys.set(_transport_key(proposal, key, member), text)

    def wait_for_transport_note(self, proposal: Proposal, key: str, *, timeout_s: float) -> bytes | None:
        """Block until the sender's note exists, and return it; None after ``timeout_s``."""
        return self._wait_and_get(_transport_key(proposal, key, None), timeout_s)

    def missing_transport_note(
        self, proposal: Proposal, key: str, members: Collection[int], *, timeout_s: float
    ) -> list[int]:
        """Wait until all ``members`` have written their note; return those still missing after ``timeout_s``."""
        return self._wait({_transport_key(proposal, key, member): member for member in members}, timeout_s)

    def forget_transport_note(self, proposal: Proposal, key: str, *, member: int | None = None) -> None:
        """Delete a note."""
        self._keys.delete(_transport_key(proposal, key, member))

    def _wait(self, members: Mapping[str, int], timeout_s: float) -> list[int]:
        return [members[key] for key in await_keys(self.store, members, timeout_s=timeout_s)]

    def _wait_and_get(self, key: str, timeout_s: float) -> bytes | None:
        await_keys(self.store, [key], timeout_s=timeout_s)
        return self._keys.get(key)


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


def _key(note: Note, *parts: int | str) -> str:
    return "/".join(map(str, (note, *parts)))


def _transport_key(proposal: Proposal, key: str, member: int | None) -> str:
    return _key(Note.TRANSPORT, proposal.number, "sender" if member is None else member, key)


def write_message(kind: StrEnum, detail: str) -> str:
    """Return a message as text that :func:`read_message` reads."""
    return json.dumps([kind, detail])


def read_message(name: str, text: bytes, kinds: type[_KindT]) -> tuple[_KindT, str]:
    """Return the kind and detail of a message. Raises TransferFailedError, with ``name``, if it is malformed."""
    try:
        kind, detail = json.loads(text)
        return kinds(kind), str(detail)
    except (ValueError, TypeError, RecursionError) as exc:
        raise _unreadable(name, text) from exc


def _read_kind(name: str, text: bytes, kinds: type[_KindT]) -> _KindT:
    try:
        return kinds(text.decode())
    except ValueError as exc:
        raise _unreadable(name, text) from exc


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
