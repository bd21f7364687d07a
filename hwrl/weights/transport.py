"""The seam between the commit of a version and the way its bytes take: a :class:`Transport`, and the rounds it serves.

A new transport is one file with a payload and the two ends, and one line in ``hwrl.weights.transports.TRANSPORTS``.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from hwrl.comm import Store
from hwrl.errors import CommAbortedError, CommError, CommTimeoutError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.control import (
    ControlChannel,
    Decision,
    Limits,
    Note,
    Proposal,
    Start,
    TransportPayload,
    Vote,
    VoteKind,
)
from hwrl.weights.destination import Destination
from hwrl.weights.layout import WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.notes import ChapterKind, ChapterNote
from hwrl.weights.report import StageClock
from hwrl.weights.slabs import Checksums, TensorReader

_LOOK_S = 0.5  # the sender looks for receivers that left meanwhile
_Found = TypeVar("_Found")


# -- what a transport implements ------------------------------------------------------------------------------------


class TransportSender(Protocol):
    """The sender's end of a transport. ``send`` may be called for the same version several times."""

    def prepare(self, number: int, to: tuple[int, ...], clock: StageClock) -> TransportPayload:
        """Prepare proposal ``number`` to receivers ``to``; return the part of the proposal for their ends."""

    def send(self, sending: SenderRound, reader: TensorReader, clock: StageClock) -> None:
        """Move the tensors of ``reader``, then the checksums. Raises CommError if this round is lost.

        ``clock.span`` measures from the first tensor on, without the connecting before it. Weights that can be read
        only once come in chapters: one call for each, and ``reader.layout`` is then another than the context's.
        Transport notes of a chapter must have been read when this returns.
        """

    def abort(self) -> None:
        """End all operations under way, here and at the receivers. Does not wait for them."""

    def end_round(self, sending: SenderRound) -> None:
        """Let go of the round's tensors, and delete its transport notes.

        Called at the end of the round, however it ended, and after each chapter that was sent.
        """

    def forget(self, payloads: Sequence[TransportPayload], *, kept: Sequence[TransportPayload]) -> None:
        """Delete the store keys of past ``payloads``, except keys shared with ``kept``."""

    def release(self) -> None:
        """Free device memory; the next round allocates it again."""

    def close(self) -> None:
        """Free everything."""


class TransportReceiver(Protocol):
    """The receiver's end of a transport."""

    def receive(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> torch.Tensor | None:
        """Move the slabs to ``destination`` and their sums to ``sums``; return the sender's sums, to compare.

        Blocks until the sender's memory is no longer in use. Raises CommError if the transfer broke. A transport that
        keeps versions returns None if a newer version has replaced this one, raises TransferFailedError if it will
        never be whole, and CommTimeoutError if it is not whole by the round's deadline.
        """

    def abort(self) -> None:
        """End all operations under way."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True)
class SenderContext:
    """Made by a sender for its transport.

    ``slabs`` are under way at once. ``versions`` and ``directory`` are for stored versions. This is sender number
    ``share`` of ``senders``, and sends the slabs of this share.
    """

    store: Store
    epoch: int
    layout: WeightLayout
    backend: Backend
    limits: Limits
    slabs: int
    versions: int
    directory: Path | None
    senders: int = 1
    share: int = 0


@dataclass(frozen=True)
class ReceiverContext:
    """Made by a receiver for its transports. At most ``slabs`` are under way at once; a destination may allow less."""

    store: Store
    backend: Backend
    slabs: int


@dataclass(frozen=True)
class Transport:
    """A way for a version's bytes: the class of its payload, its two ends, and facts.

    Code that treats transports differently reads these facts, and never a transport's name. ``keeps_versions`` False:
    all receivers take part in each transfer, and commit together. True: a version is stored whole, the sender goes on,
    and receivers fetch it when they are ready. ``packs_large_tensors`` asks for a layout that packs every tensor
    smaller than a slab. ``several_senders``: the ends can divide the slabs among senders. ``across_machines``: the ends
    may be on different machines. ``forms_groups``: both ends join a process group. ``lends_device_memory``: receivers
    open memory of the sender's device. ``stage`` is the name of ``send`` and ``receive`` in reports.
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
    """One attempt to bring a proposal to its receivers, seen from the sender."""

    def __init__(self, proposal: Proposal, channel: ControlChannel, membership: Membership) -> None:
        self.proposal = proposal
        self.seen: set[int] = set()
        """The members seen ready for this round."""
        self.votes_counted = False
        """Whether the votes are counted: no receiver uses the sender's memory."""
        self._chapter = 0
        self._channel, self._membership = channel, membership

    def gone(self) -> list[int]:
        """Return the receivers of this round that left or were replaced since it began.

        Raises TransferFailedError if another sender has taken over: its receivers are not for this one to exclude.
        """
        self._channel.check_epoch(self.proposal.epoch)
        self._membership.refresh()
        return [member for member in self.proposal.to if member not in self._membership.members]

    def wait_for_ready(self, timeout_s: float, *, new: Collection[int] = (), patience_s: float = 0.0) -> Sequence[int]:
        """Wait for all receivers; return the late ones, or at once the gone ones.

        If only ``new`` ones are missing, wait for them until ``patience_s`` after the call, not longer.
        """
        began_s = time.monotonic()
        late: Sequence[int] = self.proposal.to
        for late in self._look(self._missing_ready, timeout_s):
            self.seen.update(member for member in self.proposal.to if member not in late)
            gone = self.gone()  # a receiver may have been ready, and was cancelled
            if gone:
                return gone
            if late and set(late) <= set(new) and time.monotonic() - began_s >= patience_s:
                return late
        return late

    def wait_for_votes(
        self, timeout_s: float, *, on_torn: Callable[[], object] | None = None, torn_s: float = math.inf
    ) -> Sequence[int]:
        """Wait for all votes, except of receivers that are gone; return the silent members.

        With a first "torn" vote the round cannot commit: call ``on_torn``, and wait at most ``torn_s`` longer.
        """
        silent: Sequence[int] = self.proposal.to
        torn_since_s: float | None = None
        for silent in self._look(self._missing_votes, timeout_s):
            if silent and set(silent) <= set(self.gone()):
                break
            if on_torn is not None and torn_since_s is None and silent and self._has_torn(silent):
                torn_since_s = time.monotonic()
                on_torn()
            elif torn_since_s is not None and time.monotonic() - torn_since_s >= torn_s:
                break
        return silent

    def end_chapter(self, note: ChapterNote) -> None:
        """Tell the receivers what follows this chapter."""
        self._chapter += 1
        self._channel.put_transport_note(self.proposal, _chapter_key(self._chapter), note.to_json())

    def forget_chapters(self) -> None:
        """Delete the notes about chapters."""
        for number in range(1, self._chapter + 1):
            self._channel.forget_transport_note(self.proposal, _chapter_key(number))

    def tell(self, key: str, text: str) -> None:
        """Write a transport note to all receivers."""
        self._channel.put_transport_note(self.proposal, _in_chapter(self._chapter, key), text)

    def tell_co_senders(self, key: str) -> None:
        """Write the note ``key`` to the co-senders."""
        self._channel.put_transport_note(self.proposal, key, "")

    def wait_for_co_sender(self, key: str, *, timeout_s: float) -> bytes | None:
        """Wait for the note ``key`` of a co-sender; return None after ``timeout_s``."""
        return self._channel.wait_for_transport_note(self.proposal, key, timeout_s=timeout_s)

    def forget_co_sender_note(self, key: str) -> None:
        """Delete a note to or from the co-senders."""
        self._channel.forget_transport_note(self.proposal, key)

    def has_votes(self) -> bool:
        """Return whether a receiver has voted."""
        return any(self._channel.vote(self.proposal, member) is not None for member in self.proposal.to)

    def wait_for_all(self, key: str, *, timeout_s: float) -> None:
        """Wait until every receiver has written its transport note ``key``.

        Raises CommError if one left or voted instead, CommTimeoutError if one is silent.
        """

        def missing(members: Sequence[int], slice_s: float) -> list[int]:
            in_chapter = _in_chapter(self._chapter, key)
            return self._channel.missing_transport_note(self.proposal, in_chapter, members, timeout_s=slice_s)

        late: Sequence[int] = ()
        for late in self._look(missing, timeout_s):
            stopped = late and (self.gone() or any(self._channel.vote(self.proposal, member) for member in late))
            if stopped and missing(late, 0.0):  # a receiver may have written the note, and then its vote
                raise CommError(
                    "a receiver stopped reading",
                    why=f"one of {late} left or failed before it wrote {key!r}",
                    fix="look at its log; it continues with the version that it has",
                )
        if late:
            raise CommTimeoutError(
                "a receiver reads nothing",
                why=f"{late} did not write {key!r} within {timeout_s:g} s",
                fix="is it alive? give the sender a larger timeout_s if it is slow",
            )

    def forget(self, key: str, *, of_receivers: bool) -> None:
        """Delete the transport note ``key`` of the receivers, or of the sender."""
        for member in self.proposal.to if of_receivers else [None]:
            self._channel.forget_transport_note(self.proposal, _in_chapter(self._chapter, key), member=member)

    def _look(self, missing: Callable[[Sequence[int], float], list[int]], timeout_s: float) -> Iterator[Sequence[int]]:
        """Yield the late members every half second, until none is late or ``timeout_s`` have passed."""
        late: Sequence[int] = self.proposal.to
        waited_s = 0.0
        while late and waited_s < timeout_s:
            slice_s = min(_LOOK_S, timeout_s - waited_s)
            late = missing(late, slice_s)
            waited_s += slice_s
            yield late

    def _has_torn(self, silent: Collection[int]) -> bool:
        votes = (self._channel.vote(self.proposal, member) for member in self.proposal.to if member not in silent)
        return any(vote is not None and vote.kind is VoteKind.TORN for vote in votes)

    def _missing_ready(self, members: Sequence[int], slice_s: float) -> list[int]:
        return self._channel.missing(self.proposal, Note.READY, members, timeout_s=slice_s)

    def _missing_votes(self, members: Sequence[int], slice_s: float) -> list[int]:
        return self._channel.missing(self.proposal, Note.VOTE, members, timeout_s=slice_s)


@dataclass(frozen=True)
class ReceiverTiming:
    """How a receiver waits: it looks at the store every ``look_s``, and grants a sender ``slack_s`` extra."""

    look_s: float = 0.2
    slack_s: float = 10.0


class Cancellation:
    """Lets any thread end the receive of another one."""

    def __init__(self) -> None:
        self._requested = threading.Event()

    def request(self) -> None:
        """Let the receive under way fail at its next check; the next one if none is under way."""
        self._requested.set()

    def reset(self) -> None:
        """Let receives go on."""
        self._requested.clear()

    @property
    def is_requested(self) -> bool:
        """Whether another thread wants the receive to end."""
        return self._requested.is_set()

    def check(self) -> None:
        """Raise CommAbortedError if another thread wants the receive to end."""
        if self.is_requested:
            raise CommAbortedError("the receive was cancelled", why="its owner wanted it to end", fix="receive again")


@dataclass(frozen=True)
class MemberRound:
    """One attempt to take a proposal, seen from one of its members."""

    proposal: Proposal
    channel: ControlChannel
    member: int
    replica: str
    timing: ReceiverTiming
    cancellation: Cancellation

    @property
    def limits(self) -> Limits:
        """How long to wait for the sender."""
        return Limits(self.proposal.timeout_s, self.timing.slack_s)

    @property
    def rank(self) -> int:
        """This receiver's rank; the sender is rank 0."""
        return 1 + self.proposal.to.index(self.member)

    def is_newest(self) -> bool:
        """Return whether the proposal is the newest one."""
        return self.channel.newest() == self.proposal.number

    def cast(self, vote: Vote) -> None:
        """Vote."""
        self.channel.cast_vote(self.proposal, self.member, vote)

    def wait_for_start(self) -> Start | None:
        """Wait for the sender's answer to READY; None if the proposal ended without it."""
        return self._wait(Note.START, self.channel.wait_for_start, self.limits.start_s)

    def wait_for_decision(self) -> Decision | None:
        """Wait for the sender's decision; None if another proposal or sender came instead."""
        return self._wait(Note.DECISION, self.channel.wait_for_decision, self.limits.decision_s)

    def _wait(self, name: str, find: Callable[..., _Found | None], limit_s: float) -> _Found | None:
        """Wait for a note of the sender; None if its decision, or another proposal or sender, came instead."""
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            found = find(self.proposal, timeout_s=min(self.timing.look_s, max(0.0, left_s)))
            self.channel.check_member(self.member, self.replica)
            if found is not None:
                return found
            self.cancellation.check()
            if self._is_over() or (name != Note.DECISION and self.channel.decision(self.proposal) is not None):
                return find(self.proposal, timeout_s=0.0)  # the note may have come just before
            if left_s <= 0:
                raise TransferFailedError(
                    f"version {self.proposal.version} did not commit in {self.replica!r}",
                    why=f"the sender's {str(name)!r} did not come within {limit_s:g} s; its timeout_s is "
                    f"{self.proposal.timeout_s:g} s",
                    fix="is the sender alive? this receiver continues with the version that it has",
                )

    def _is_over(self) -> bool:
        return not self.is_newest() or self.channel.epoch() != self.proposal.epoch


@dataclass(frozen=True)
class ReceiverRound(MemberRound):
    """One attempt to receive a proposal's tensors. ``deadline`` is on the monotonic clock.

    ``layout`` is that of chapter number ``chapter``; most versions have only chapter 0.
    """

    layout: WeightLayout
    deadline: float
    chapter: int = 0

    def further_chapters(self) -> Iterator[ReceiverRound]:
        """Yield a round for each further layout of the version, when the sender begins it.

        Raises CommError if the sender broke off. Raises TransferFailedError or LayoutMismatchError if its note or the
        layout is malformed.
        """
        for number in itertools.count(1):
            note = ChapterNote.read(self._wait_for_note(_chapter_key(number)))
            if note.kind is ChapterKind.END:
                return
            if note.kind is ChapterKind.BROKEN_OFF:
                raise CommError("the sender broke off", why="it or another receiver failed", fix="look at its log")
            yield replace(self, layout=WeightLayout.from_json(note.layout), chapter=number)

    def tell(self, key: str) -> None:
        """Write this receiver's transport note ``key``."""
        self.channel.put_transport_note(self.proposal, _in_chapter(self.chapter, key), "", member=self.member)

    def find_note(self, key: str) -> bytes | None:
        """Return the sender's transport note ``key`` if it is there. One short wait."""
        return self.channel.wait_for_transport_note(self.proposal, _in_chapter(self.chapter, key), timeout_s=0.0)

    def wait_for_note(self, key: str) -> bytes:
        """Wait for the sender's transport note ``key``; raises CommError if the proposal ended without it."""
        return self._wait_for_note(_in_chapter(self.chapter, key))

    def _wait_for_note(self, key: str) -> bytes:
        def find(proposal: Proposal, *, timeout_s: float) -> bytes | None:
            return self.channel.wait_for_transport_note(proposal, key, timeout_s=timeout_s)

        found = self._wait(key, find, self.limits.decision_s)
        if found is None:
            raise CommError(
                "the sender gave up",
                why=f"it decided about version {self.proposal.version} without writing {key!r}",
                fix="look at the sender; this receiver continues with the version that it has",
            )
        return found


def _chapter_key(number: int) -> str:
    return f"chapter/{number}"


def _in_chapter(number: int, key: str) -> str:
    """Return the key of a transport's note. It begins with a digit, and keys of hwrl's own notes with a letter."""
    return f"{number}/{key}"
