"""The control channel of a weight link: small typed JSON messages under the keys of a store.

Each message of a round has one writer. The counters and the newest proposal's number have several, and change by one
atomic operation. A join request is several writes; :mod:`hwrl.weights.membership` handles incomplete ones.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from typing import TYPE_CHECKING, TypeVar

from hwrl.comm import PrefixStore, Store, await_keys, clone_store
from hwrl.comm.store import pause, store_failures
from hwrl.errors import CommError, LayoutMismatchError, ReceiverExcludedError, TransferFailedError
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import Abandonment, Decision, DecisionKind, Proposal, Vote

if TYPE_CHECKING:
    from hwrl.weights.transport import Transport

_NUMBER_BITS = 32  # of a proposal's number; the sender's epoch is above them
_ABSENT = "\x01"  # never a value: compare_set returns it for a missing key, and then writes nothing
_NEWEST = "newest proposal"
_Result = TypeVar("_Result")


class Note(StrEnum):
    """The kinds of messages. A key begins with the kind; mostly the number of a proposal or member follows."""

    LAYOUT = "layout"
    PROPOSAL = "proposal"
    READY = "ready"
    START = "start"
    VOTE = "vote"
    DECISION = "decision"
    TRANSPORT = "transport"
    SHARE = "share"
    JOIN = "join"
    EXCLUDED = "excluded"
    ABANDONED = "abandoned"


class ControlChannel:
    """The messages of the link ``name`` in ``store``. Reads proposals of ``transports`` only.

    Raises PeerLostError if the store is lost, and CommError in a forked child of the process that made this: both would
    speak over one connection.
    """

    def __init__(self, store: Store, *, name: str, transports: Mapping[str, Transport]) -> None:
        # Its own connection: a client that waits blocks other threads, and making a process group waits.
        self.store: Store = PrefixStore(f"weights/{name}", clone_store(store))
        self.name, self.transports, self._process = name, transports, os.getpid()
        self.shown: Proposal | None = None
        """The last proposal that this end has made visible to receivers."""

    def require_own_process(self) -> None:
        """Raise CommError in a forked child."""
        if os.getpid() != self._process:
            raise CommError(
                "this end of a weight link belongs to another process",
                why=f"process {self._process} made it, and this is its forked child {os.getpid()}",
                fix="make a sender or receiver in the child, with connect_store(address)",
            )

    # -- keys: no operation but ``wait`` waits until a key exists ----------------------------------------------

    def _do(self, operation: Callable[..., _Result], *arguments: object) -> _Result:
        if os.getpid() != self._process:
            self.require_own_process()
        try:
            return operation(*arguments)
        except RuntimeError:
            with store_failures():
                raise

    def _get(self, key: str) -> bytes | None:
        """Return the value, or None if the key does not exist. One round trip."""
        found = self._do(self.store.compare_set, key, _ABSENT, _ABSENT)
        return None if found == _ABSENT.encode() else found

    def _delete(self, keys: Iterable[str]) -> None:
        self._do(lambda: [self.store.delete_key(key) for key in keys])

    # -- notes about a proposal: the sender's, or those of a member ---------------------------------------------

    def write(
        self, proposal: Proposal, note: Note, text: str = "", *, member: int | None = None, name: str = ""
    ) -> None:
        """Write the ``note`` of the sender, or of ``member``. Notes of one kind differ by ``name``."""
        self._do(self.store.set, _key(proposal, note, member, name), text)

    def read(
        self, proposal: Proposal, note: Note, *, member: int | None = None, name: str = "", timeout_s: float = 0.0
    ) -> bytes | None:
        """Return a note. Block until it exists, but not beyond ``timeout_s``; return None then."""
        key = _key(proposal, note, member, name)
        if timeout_s > 0.0:
            await_keys(self.store, [key], timeout_s=timeout_s)
        return self._get(key)

    def missing(
        self, proposal: Proposal, note: Note, members: Collection[int], *, timeout_s: float, name: str = ""
    ) -> list[int]:
        """Wait until all ``members`` have written ``note``; return those still missing after ``timeout_s``."""
        of_key = {_key(proposal, note, member, name): member for member in members}
        return [of_key[key] for key in await_keys(self.store, of_key, timeout_s=timeout_s)]

    def erase(self, proposal: Proposal, note: Note, *, members: Iterable[int | None] = (None,), name: str = "") -> None:
        """Delete a note of the sender, or of each of ``members``."""
        self._delete(_key(proposal, note, member, name) for member in members)

    def vote(self, proposal: Proposal, member: int) -> Vote | None:
        """Return a receiver's vote, or None if it has not voted."""
        found = self.read(proposal, Note.VOTE, member=member)
        return None if found is None else Vote.read(found)

    def decision(self, proposal: Proposal, *, timeout_s: float = 0.0) -> Decision | None:
        """Return the sender's decision; wait for it up to ``timeout_s``."""
        found = self.read(proposal, Note.DECISION, timeout_s=timeout_s)
        return None if found is None else Decision.read(found)

    # -- the sender writes --------------------------------------------------------------------------------------

    def begin_epoch(self) -> int:
        """Register a new sender and return its number, the epoch. This deposes all earlier senders."""
        return self._do(self.store.add, "epochs", 1)

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
        self._do(self.store.set, f"{Note.LAYOUT}/{layout.hash}", layout.to_json())

    def reserve_number(self, epoch: int) -> int:
        """Return the number of a new proposal of sender ``epoch``. No other sender gets it.

        It is larger than all numbers of earlier senders, also those that a deposed one still running gets later.
        """
        return (epoch - 1 << _NUMBER_BITS) + self._do(self.store.add, "proposal numbers", 1)

    def propose(self, proposal: Proposal) -> None:
        """Make ``proposal`` visible to the receivers; they see all of it or nothing."""
        number = proposal.number
        self.write(proposal, Note.PROPOSAL, json.dumps(asdict(proposal)))
        expected = str(number - 1) if number > 1 else ""
        while True:  # set the newest number to this one, unless it is larger; usually one round trip
            found = self._do(self.store.compare_set, _NEWEST, expected, str(number)).decode(errors="replace")
            if found == str(number):
                break
            if found == expected:  # or the key is missing: compare_set writes it only if "" is expected
                expected = ""
            elif _number(found) > number:
                break
            else:
                expected = found
        self.shown = proposal

    def decide(self, proposal: Proposal, kind: DecisionKind, why: str = "") -> None:
        """Tell the receivers how the proposal ended. Written once, except that :meth:`give_up` replaces AGAIN."""
        self.write(proposal, Note.DECISION, Decision(kind, why).to_json())

    def give_up(self, proposal: Proposal, why: str) -> None:
        """Tell the receivers that no proposal follows.

        Does nothing if ``proposal`` was committed or never visible, or if its sender is deposed: the receivers then
        wait for the new sender.
        """
        if self.newest() < proposal.number or self.epoch() != proposal.epoch:
            return
        decision = self.decision(proposal)
        if decision is None or decision.kind is DecisionKind.AGAIN:
            self.decide(proposal, DecisionKind.GIVEN_UP, why)

    def abandon(self, epoch: int, version: int, why: str, *, to: Sequence[int]) -> None:
        """Tell receivers ``to``, without a part in the last round, that the sender of ``epoch`` gave up ``version``."""
        found = Abandonment(self._do(self.store.add, "abandonments", 1), epoch, version, why, tuple(to))
        self._do(self.store.set, Note.ABANDONED, json.dumps(asdict(found)))

    def exclude(self, member: int, why: str) -> None:
        """Exclude a receiver, which gets the reason ``why``."""
        self._do(self.store.set, f"{Note.EXCLUDED}/{member}", why)
        self._delete([f"{Note.JOIN}/{member}"])

    def forget(self, proposal: Proposal) -> None:
        """Delete the messages about a proposal. No receiver may still be waiting for one."""
        keys = [f"{note}/{proposal.number}" for note in (Note.START, Note.DECISION, Note.PROPOSAL)]
        for member in proposal.to:
            keys += f"{Note.READY}/{proposal.number}/{member}", f"{Note.VOTE}/{proposal.number}/{member}"
        self._delete(keys)

    # -- the sender reads ---------------------------------------------------------------------------------------

    def join_counts(self) -> tuple[int, int]:
        """Return how many join requests are complete, and the newest join number."""
        return self._do(self.store.add, "joins", 0), self._do(self.store.add, "numbers", 0)

    def replica(self, member: int) -> str | None:
        """Return the replica name of receiver ``member``; None if it has left, or its join request is incomplete."""
        found = self._get(f"{Note.JOIN}/{member}")
        return None if found is None else found.decode(errors="replace")

    # -- the receivers write ------------------------------------------------------------------------------------

    def join(self, *replicas: str) -> tuple[int, ...]:
        """Request versions for receivers called ``replicas``; return their join numbers.

        The requests become complete together, so the sender usually sees all of them at once.
        """
        last = self._do(self.store.add, "numbers", len(replicas))
        numbers = tuple(range(last - len(replicas) + 1, last + 1))
        for number, replica in zip(numbers, replicas, strict=True):
            self._do(self.store.set, f"{Note.JOIN}/{number}", replica)
        self._do(self.store.add, "joins", len(replicas))
        return numbers

    def leave(self, member: int) -> None:
        """Withdraw the join request. Its number is not used again."""
        self._delete([f"{Note.JOIN}/{member}", f"{Note.EXCLUDED}/{member}"])

    # -- the receivers read -------------------------------------------------------------------------------------

    def newest(self) -> int:
        """Return the newest proposal's number, 0 before the first. One short round trip."""
        return _number(self._get(_NEWEST) or b"0")

    def epoch(self) -> int:
        """Return the newest sender's number, 0 before the first."""
        return self._do(self.store.add, "epochs", 0)

    def proposal(self, number: int) -> Proposal | None:
        """Return proposal ``number``, or None if its messages were deleted."""
        text = self._get(f"{Note.PROPOSAL}/{number}")
        return None if text is None else Proposal.read(text, self.transports)

    def wait_for_newer(self, number: int, *, timeout_s: float) -> None:
        """Block until there is a newer proposal than ``number``, or ``timeout_s`` has passed."""
        began_s = time.monotonic()
        while self.newest() <= number and (passed_s := time.monotonic() - began_s) < timeout_s:
            pause(passed_s)

    def abandonment(self) -> Abandonment:
        """Return the newest abandonment; its number is 0 if there is none."""
        text = self._get(Note.ABANDONED)
        return Abandonment() if text is None else Abandonment.read(text)

    def check_member(self, member: int, replica: str) -> None:
        """Raise ReceiverExcludedError if receiver ``member`` was excluded."""
        why = self._get(f"{Note.EXCLUDED}/{member}")
        if why is not None:
            raise ReceiverExcludedError(
                f"receiver {replica!r} was excluded from {self.name!r}",
                why=why.decode(errors="replace"),
                fix="call join() to get the next version",
            )

    def layout(self, proposal: Proposal) -> WeightLayout:
        """Return the proposal's layout. Raises LayoutMismatchError if it is malformed or has another hash."""
        layout = WeightLayout.from_json(self._get(f"{Note.LAYOUT}/{proposal.layout_hash}") or b"")
        if layout.hash != proposal.layout_hash:
            raise LayoutMismatchError(
                "this is not the layout of the proposal", why="the hashes differ", fix="use the same hwrl on both sides"
            )
        return layout


def _key(proposal: Proposal, note: Note, member: int | None, name: str) -> str:
    of_proposal = f"{note}/{proposal.number}"
    if name:
        return f"{of_proposal}/{'sender' if member is None else member}/{name}"
    return of_proposal if member is None else f"{of_proposal}/{member}"


def _number(found: str | bytes) -> int:
    try:
        return int(found)
    except ValueError as exc:
        raise TransferFailedError(
            "the store is damaged", why=f"{_NEWEST!r} is not a number but {found[:80]!r}", fix="start the run again"
        ) from exc
