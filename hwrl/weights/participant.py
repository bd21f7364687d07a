"""The receiver's side of a commit, after the rendezvous: transfer, vote and decision, or fetching a stored version.

:class:`~hwrl.weights.LinkRegistrations` does the rendezvous (READY and START).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import torch

from hwrl.errors import CommError, TransferFailedError
from hwrl.weights.destination import ChapteredDestination
from hwrl.weights.messages import DecisionKind, Proposal, Vote, VoteKind
from hwrl.weights.report import StageClock
from hwrl.weights.slabs import Checksums
from hwrl.weights.transport import ReceiverRound, Transport, TransportReceiver

_HELD_S = 1.0
"""A transfer that takes longer may be held. From then on the receiver looks whether the round is over."""
_log = logging.getLogger("hwrl.weights")


class Participant:
    """Receives proposals of one transport into ``destination``. The participant of the two-phase commit."""

    def __init__(
        self, transport: Transport, end: TransportReceiver, destination: ChapteredDestination, *, device: torch.device
    ) -> None:
        self._transport, self._end, self._destination, self._device = transport, end, destination, device

    def take(self, receiving: ReceiverRound, sums: Checksums, clock: StageClock, *, after: int) -> Proposal | None:
        """Receive the round's proposal; return the proposal that is complete here, or None.

        If a stored version is lost, corrupt or never completed, the stored version before it is received instead, if
        its number is above ``after``. Raises TransferFailedError or CommTimeoutError.
        """
        if not self._transport.keeps_versions:
            return self._take_part(receiving, sums, clock)
        try:
            return self._fetch(receiving, sums, clock)
        except TransferFailedError as exc:
            number = receiving.proposal.last_stored_number
            earlier = receiving.channel.proposal(number) if number > after else None
            if earlier is None:
                raise
            _log.warning("receiving version %d instead: %s", earlier.version, exc)
            return self._fetch(replace(receiving, proposal=earlier), sums, clock)

    def _take_part(self, receiving: ReceiverRound, sums: Checksums, clock: StageClock) -> Proposal | None:
        """Take part in a two-phase commit: receive, vote, and wait for the decision."""
        with self._ended_with_round(receiving), clock(self._transport.stage), torch.no_grad():
            vote = self._receive_and_compare(receiving, sums, clock)
        with clock("vote"):
            receiving.cast(vote)
            decision = receiving.wait_for_decision()
        committed = decision is not None and decision.kind is DecisionKind.COMMITTED
        return receiving.proposal if committed else None

    @contextlib.contextmanager
    def _ended_with_round(self, receiving: ReceiverRound) -> Iterator[None]:
        """Abort the transfer in the block when its round is over: the sender waits no longer for this receiver.

        A collective library may hold an operation that begins while its peer leaves, until the transfer's limit.
        """
        lock, ended = threading.Lock(), threading.Event()

        def look() -> None:
            while not ended.wait(receiving.timing.look_s):
                with contextlib.suppress(CommError, TransferFailedError):  # the receiver meets these by itself
                    over = receiving.is_over()
                    with lock:
                        if over and not ended.is_set():
                            self._end.abort()
                            return

        watch = threading.Timer(_HELD_S, look)
        watch.daemon = True
        watch.start()
        try:
            yield
        finally:
            watch.cancel()
            with lock:  # so that nothing is aborted after the block
                ended.set()

    def _receive_and_compare(self, receiving: ReceiverRound, sums: Checksums, clock: StageClock) -> Vote:
        try:
            theirs = self._receive(receiving, sums, clock)
            if theirs is None:
                return Vote(VoteKind.TORN, "a newer version replaced it")
            return self._receive_chapters(receiving, sums.compare(theirs), clock)
        except CommError as exc:
            return Vote.of_error(exc)
        except BaseException as exc:  # at once, because the other receivers wait for this vote
            receiving.cast(Vote.of_error(exc))
            raise

    def _receive_chapters(self, receiving: ReceiverRound, vote: Vote, clock: StageClock) -> Vote:
        """Receive the chapters after chapter 0, whose vote is ``vote``; return the vote about all chapters."""
        if not receiving.proposal.chapters:
            return vote
        try:
            for chapter in receiving.further_chapters():  # to the last one, because other receivers take part in it
                destination = self._destination.begin_chapter(chapter.layout)
                sums = Checksums(chapter.layout, device=self._device)
                theirs = self._end.receive(chapter, destination, sums, clock)
                assert theirs is not None, "transports that keep versions have no chapters"
                vote = sums.compare(theirs) if vote.kind is VoteKind.WHOLE else vote
        except BaseException:
            self._end.abort()
            raise
        return vote

    def _fetch(self, receiving: ReceiverRound, sums: Checksums, clock: StageClock) -> Proposal | None:
        """Copy a stored version, even while it is being written; return None if a newer one has replaced it."""
        with clock(self._transport.stage), torch.no_grad():
            theirs = self._receive(receiving, sums, clock)
            if theirs is None:
                return None
            vote = sums.compare(theirs)
        if vote.kind is VoteKind.WHOLE:
            return receiving.proposal
        raise TransferFailedError(
            f"version {receiving.proposal.version} was not received",
            why=f"the bytes received differ from those written ({vote})",
            fix="publish it again, then receive again",
        )

    def _receive(self, receiving: ReceiverRound, sums: Checksums, clock: StageClock) -> torch.Tensor | None:
        clock.forget_spans()
        return self._end.receive(receiving, self._destination.begin(), sums, clock)
