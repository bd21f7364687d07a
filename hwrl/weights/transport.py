"""The interface between the commit of a version and the transfer of its bytes: :class:`Transport`, and the rounds.

A new transport is a payload class and two ends, in a package of its own with an entry point in ``hwrl.transports``
(``hwrl new-transport`` writes one). hwrl's own are in :mod:`hwrl.weights.transports`.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from hwrl.comm import Store
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.buckets import Checksums, TensorReader
from hwrl.weights.control import ControlChannel, Note
from hwrl.weights.destination import Destination
from hwrl.weights.layout import WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.messages import Decision, Limits, Proposal, TransportPayload, Vote
from hwrl.weights.report import StageClock

_LOOK_S = 0.5  # how often a waiting sender checks whether receivers have left
RECEIVER_LOOK_S = 0.2
"""How often a waiting receiver looks for what would end its wait."""


# -- what a transport implements ------------------------------------------------------------------------------------


class TransportSender(Protocol):
    """The sender's end of a transport. ``send`` may be called several times for the same version."""

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> TransportPayload:
        """Prepare the transfer of proposal ``number`` to receivers ``to``; return the payload for the receivers' ends.

        Connecting with the receivers happens in :meth:`send`, because they do not know the proposal yet.
        """

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> torch.Tensor:
        """Move the tensors of ``reader``, then the checksums. Raises CommError if the transfer broke.

        Returns the checksums (``Checksums.values``) of this end's buckets, and zeros for those of other senders. The
        next call may overwrite them.

        Measure from the first tensor on with ``clock.span``, after connecting.
        """

    def abort(self) -> None:
        """End the operations under way, here and at the receivers, as far as the transport can.

        Waits for no peer, unless its library cannot abort an operation. Any thread may call this, repeatedly, and even
        while ``send`` is still connecting.
        """

    def end_round(self, sending: SenderRound) -> None:
        """Release the round's tensors, and delete its transport notes.

        Called at the end of each round, whatever its outcome.
        """

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Delete the store keys of past ``payloads``, except keys shared with ``kept``."""

    def release(self) -> None:
        """Free device memory; the next round allocates it again."""

    def close(self) -> None:
        """Free all memory and connections. Called last, after :meth:`abort`, and often after :meth:`release`."""


class TransportReceiver(Protocol):
    """The receiver's end of a transport."""

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor | None:
        """Receive the buckets into ``destination`` and their checksums into ``sums``; return the sender's checksums.

        Blocks until this end no longer reads the sender's memory. Raises CommError if the transfer broke. A transport
        that keeps versions returns None if a newer version has replaced this one. It raises TransferFailedError if the
        version will never be complete, and CommTimeoutError if it is not complete at the round's deadline.
        """

    def abort(self) -> None:
        """End the operations under way, as far as the transport can. Any thread may call this, and repeatedly."""

    def close(self) -> None:
        """Free all memory and connections."""


@dataclass(frozen=True)
class SenderContext:
    """What a sender gives its transport.

    At most ``buckets`` buckets are under way at once. ``versions`` is for stored versions. The end sends
    the buckets of share number ``share``, of ``senders`` shares.
    """

    store: Store
    epoch: int
    layout: WeightLayout
    backend: Backend
    limits: Limits
    buckets: int
    versions: int
    senders: int = 1
    share: int = 0


@dataclass(frozen=True)
class ReceiverContext:
    """What a receiver gives its transports.

    A transport that queues buckets ahead has at most ``buckets`` of each sender under way; a destination may allow
    fewer.
    """

    store: Store
    backend: Backend
    buckets: int


@dataclass(frozen=True)
class Transport:
    """A way to transfer a version's bytes: the payload class, the two ends, and facts about them.

    Code that treats transports differently reads these facts, and never a transport's name:

    - ``keeps_versions``: a version is stored, the sender goes on, and each receiver fetches it when it is ready. If
      False, the receivers take part in each transfer, and one decision commits it for all with a whole copy.
    - ``packs_large_tensors``: all tensors smaller than a bucket share buckets. Larger ones have their own in any case.
    - ``several_senders``: the ends can divide the buckets among senders. The sender and ``hwrl train`` read it.
    - ``across_machines``: the two ends may be on different machines. ``hwrl train`` reads it to place processes.
    - ``forms_groups``: both ends join a process group. The conformance kit reads it.
    - ``lends_device_memory``: receivers open memory of the sender's device. ``hwrl train`` and the kit read it.

    ``stage`` is the name of ``send`` and ``receive`` in reports.
    """

    payload: type[TransportPayload]
    sender: Callable[[SenderContext], TransportSender]
    receiver: Callable[[ReceiverContext], TransportReceiver]
    keeps_versions: bool = False
    packs_large_tensors: bool = False
    several_senders: bool = False
    across_machines: bool = False
    forms_groups: bool = False
    lends_device_memory: bool = False
    stage: str = "wire"


# -- what a transport gets ------------------------------------------------------------------------------------------


class SenderRound:
    """One attempt to commit a proposal, seen from the sender."""

    def __init__(self, proposal: Proposal, channel: ControlChannel, membership: Membership) -> None:
        self.proposal = proposal
        self.seen: set[int] = set()
        """The members that have been ready in this round."""
        self.votes_counted = False
        """Whether the votes were counted. An excluded receiver without a vote may still use the sender's memory."""
        self.channel, self._membership = channel, membership

    def gone(self) -> list[int]:
        """Return the receivers that have left or were replaced since the round began.

        Raises TransferFailedError if another sender has taken over, because this one may then exclude nobody.
        """
        self.channel.check_epoch(self.proposal.epoch)
        self._membership.refresh()
        return [member for member in self.proposal.to if member not in self._membership.members]

    def wait_for_ready(self, timeout_s: float, *, new: Collection[int] = (), patience_s: float = 0.0) -> Sequence[int]:
        """Wait until all receivers are ready; return the late ones. If some are gone, return these at once.

        If only ``new`` ones are late, wait for them no longer than ``patience_s`` after the call.
        """
        began_s = time.monotonic()
        late: Sequence[int] = self.proposal.to
        for late in self._look(Note.READY, timeout_s):
            self.seen.update(member for member in self.proposal.to if member not in late)
            gone = self.gone()  # it may have been ready and then cancelled
            if gone:
                return gone
            if late and set(late) <= set(new) and time.monotonic() - began_s >= patience_s:
                return late
        return late

    def wait_for_votes(
        self, timeout_s: float, *, on_broken: Callable[[], object] | None = None, broken_s: float = math.inf
    ) -> Sequence[int]:
        """Wait for the votes of all receivers that are not gone; return the members without a vote.

        After the first broken vote (:attr:`VoteKind.is_broken`), call ``on_broken`` and wait at most ``broken_s``
        longer: the other receivers may wait for the one that has ended its part.
        """
        silent: Sequence[int] = self.proposal.to
        broken_since_s: float | None = None
        for silent in self._look(Note.VOTE, timeout_s):
            if silent and set(silent) <= set(self.gone()):
                break
            if on_broken is not None and broken_since_s is None and silent:
                if any(vote.kind.is_broken for vote in self.votes(but=silent).values()):
                    broken_since_s = time.monotonic()
                    on_broken()
            elif broken_since_s is not None and time.monotonic() - broken_since_s >= broken_s:
                break
        return silent

    def tell(self, key: str, text: str) -> None:
        """Write a transport note for all receivers, under a key of the transport's choice."""
        self.channel.write(self.proposal, Note.TRANSPORT, text, name=key)

    def votes(self, *, but: Collection[int] = ()) -> dict[int, Vote]:
        """Return the votes so far, by member, of all receivers ``but`` these."""
        votes = {member: self.channel.vote(self.proposal, member) for member in self.proposal.to if member not in but}
        return {member: vote for member, vote in votes.items() if vote is not None}

    def wait_for_all(self, key: str, *, timeout_s: float) -> None:
        """Wait until every receiver has written its transport note ``key``.

        Raises CommError if a receiver left or voted instead, and CommTimeoutError after ``timeout_s``.
        """
        late: Sequence[int] = ()
        for late in self._look(Note.TRANSPORT, timeout_s, name=key):
            stopped = late and (self.gone() or any(self.channel.vote(self.proposal, member) for member in late))
            # It may have written the note just before its vote.
            if stopped and self.channel.missing(self.proposal, Note.TRANSPORT, late, timeout_s=0.0, name=key):
                raise CommError(
                    "a receiver stopped reading",
                    why=f"a receiver left, or one of {late} voted before it wrote {key!r}",
                    fix="look at its log",
                )
        if late:
            raise CommTimeoutError(
                "a receiver does not read",
                why=f"{late} did not write {key!r} within {timeout_s:g} s",
                fix="check that it is alive; if it is slow, give the sender a larger timeout_s",
            )

    def forget(self, key: str, *, of_receivers: bool) -> None:
        """Delete the transport note ``key``: the receivers' or the sender's."""
        members: Sequence[int | None] = self.proposal.to if of_receivers else [None]
        self.channel.erase(self.proposal, Note.TRANSPORT, members=members, name=key)

    def _look(self, note: Note, timeout_s: float, *, name: str = "") -> Iterator[Sequence[int]]:
        """Yield the members without ``note`` every half second, until none is left or ``timeout_s`` has passed.

        Look once at least. What the caller does between two looks counts, too.
        """
        late: Sequence[int] = self.proposal.to
        deadline = time.monotonic() + timeout_s
        left_s = timeout_s
        while late:
            wait_s = max(0.0, min(_LOOK_S, left_s))
            late = self.channel.missing(self.proposal, note, late, timeout_s=wait_s, name=name)
            yield late
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break


class Cancellation(threading.Event):
    """Set by any thread, it ends the present receive of another thread, or the next one if there is none."""

    def check(self) -> None:
        """Raise CommAbortedError if it is set."""
        if self.is_set():
            raise CommAbortedError("the receive was cancelled", why="its owner called cancel()", fix="receive again")


@contextlib.contextmanager
def aborted_when(is_over: Callable[[], bool], abort: Callable[[], object], *, after_s: float = 0.0) -> Iterator[None]:
    """Call ``abort`` repeatedly, from another thread, while ``is_over`` and the block has not ended.

    Looks from ``after_s`` seconds on. A collective library may hold the block in an operation whose peer has left.
    """
    lock, ended = threading.Lock(), threading.Event()

    def look() -> None:
        while not ended.wait(RECEIVER_LOOK_S):
            with contextlib.suppress(CommError, TransferFailedError):  # the block meets these by itself
                over = is_over()
                with lock:
                    if over and not ended.is_set():
                        abort()

    watch = threading.Timer(after_s, look)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
        with lock:  # so that nothing is aborted after the block
            ended.set()


@dataclass(frozen=True)
class ReceiverRound:
    """One attempt to commit a proposal, seen from one of its members.

    ``deadline``, on the monotonic clock, limits the wait for a stored version to be complete.
    """

    proposal: Proposal
    channel: ControlChannel
    member: int
    replica: str
    cancellation: Cancellation
    deadline: float = math.inf

    @property
    def rank(self) -> int:
        """This receiver's rank; the sender is rank 0."""
        return 1 + self.proposal.to.index(self.member)

    def is_newest(self) -> bool:
        """Return whether no newer proposal exists."""
        return self.channel.newest() == self.proposal.number

    def cast(self, vote: Vote) -> None:
        """Write this member's vote."""
        self.channel.write(self.proposal, Note.VOTE, vote.to_json(), member=self.member)

    def wait_for_start(self) -> bool:
        """Wait for the sender's answer to READY; return whether the transfer begins."""
        return self._wait(Note.START, limit_s=self.proposal.limits.start_s) is not None

    def wait_for_decision(self) -> Decision | None:
        """Wait for the sender's decision; return None if another proposal or sender has come instead."""
        found = self._wait(Note.DECISION, limit_s=self.proposal.limits.decision_s)
        return None if found is None else Decision.read(found)

    def is_over(self) -> bool:
        """Return whether the sender has decided, or another proposal or sender has come instead."""
        replaced = not self.is_newest() or self.channel.epoch() != self.proposal.epoch
        return replaced or self.channel.decision(self.proposal) is not None

    def tell(self, key: str) -> None:
        """Write this receiver's transport note ``key``."""
        self.channel.write(self.proposal, Note.TRANSPORT, member=self.member, name=key)

    def find_note(self, key: str) -> bytes | None:
        """Return the sender's transport note ``key`` if it exists, else None. One short round trip."""
        return self.channel.read(self.proposal, Note.TRANSPORT, name=key)

    def wait_for_note(self, key: str) -> bytes:
        """Wait for the sender's transport note ``key``. Raises CommError if the proposal ends without it."""
        found = self._wait(Note.TRANSPORT, limit_s=self.proposal.limits.decision_s, name=key)
        if found is None:
            raise CommError(
                "the sender gave up",
                why=f"it decided about version {self.proposal.version} without writing {key!r}",
                fix="look at the sender's log, then receive again",
            )
        return found

    def _wait(self, note: Note, *, limit_s: float, name: str = "") -> bytes | None:
        """Wait for a note of the sender; return None if its decision, another proposal or another sender came first."""
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            wait_s = max(0.0, min(RECEIVER_LOOK_S, left_s))
            found = self.channel.read(self.proposal, note, name=name, timeout_s=wait_s)
            self.channel.check_member(self.member, self.replica)
            if found is not None:
                return found
            self.cancellation.check()
            if self.is_over():
                return self.channel.read(self.proposal, note, name=name)  # it may have been written just before
            if left_s <= 0:
                raise TransferFailedError(
                    f"version {self.proposal.version} was not committed in {self.replica!r}",
                    why=f"the sender's {name or str(note)!r} did not come within {limit_s:g} s; its timeout_s is "
                    f"{self.proposal.timeout_s:g} s",
                    fix="check that the sender is alive, then receive again",
                )
