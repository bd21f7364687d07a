"""The control channel of a weight link: small typed JSON messages under the keys of a store.

Each message of a round has one writer. The counters and the newest proposal's number have several, and change by one
atomic operation. A join request is several writes; :mod:`hwrl.weights.membership` handles incomplete ones.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum

from hwrl.comm import PrefixStore, Store, await_keys, clone_store
from hwrl.comm.store import pause
from hwrl.errors import LayoutMismatchError, ReceiverExcludedError, TransferFailedError
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import (
    Abandonment,
    Decision,
    DecisionKind,
    Proposal,
    Start,
    TransportPayload,
    Vote,
    read_kind,
    write_message,
)
from hwrl.weights.store_keys import StoreKeys

_NUMBER_BITS = 32  # of a proposal's number; the sender's epoch is above them


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


class ControlChannel:
    """The messages of the link ``name`` in ``store``. ``payloads`` maps each known transport to its payload class."""

    def __init__(self, store: Store, *, name: str, payloads: Mapping[str, type[TransportPayload]]) -> None:
        # Its own connection: a client that waits blocks other threads, and making a process group waits.
        self.store: Store = PrefixStore(f"weights/{name}", clone_store(store))
        self.name = name
        self._keys = StoreKeys(self.store)
        self.require_own_process = self._keys.require_own_process
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

    def reserve_number(self, epoch: int) -> int:
        """Return the number of a new proposal of sender ``epoch``. No other sender gets it.

        It is larger than all numbers of earlier senders, also those that a deposed one still running gets later.
        """
        return (epoch - 1 << _NUMBER_BITS) + self._keys.add("proposal numbers", 1)

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
        """Tell the receivers that no proposal follows.

        Does nothing if ``proposal`` was committed or never visible, or if its sender is deposed: the receivers then
        wait for the new sender.
        """
        if self.newest() < proposal.number or self.epoch() != proposal.epoch:
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

    def wait_for_newer(self, number: int, *, timeout_s: float) -> None:
        """Block until there is a newer proposal than ``number``, or ``timeout_s`` has passed."""
        began_s = time.monotonic()
        while self.newest() <= number and (passed_s := time.monotonic() - began_s) < timeout_s:
            pause(passed_s)

    def wait_for_start(self, proposal: Proposal, *, timeout_s: float) -> Start | None:
        """Block until the sender has answered READY; return None after ``timeout_s``."""
        text = self._wait_and_get(_key(Note.START, proposal.number), timeout_s)
        return None if text is None else read_kind("the start", text, Start)

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


def _key(note: Note, *parts: int | str) -> str:
    return "/".join(map(str, (note, *parts)))


def _transport_key(proposal: Proposal, key: str, member: int | None) -> str:
    return _key(Note.TRANSPORT, proposal.number, "sender" if member is None else member, key)
