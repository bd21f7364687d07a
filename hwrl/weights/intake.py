"""Receives the bytes of a proposed version for one member of a link, verifies them, and votes.

It is the receiver's part of a commit after the rendezvous (:class:`~hwrl.weights.LinkRegistrations`).
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from hwrl.errors import CommError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.buckets import Checksums
from hwrl.weights.control import ControlChannel
from hwrl.weights.copy_destination import CopyDestination
from hwrl.weights.destination import Destination, DestinationFactory
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import DecisionKind, Proposal, Vote, VoteKind
from hwrl.weights.report import StageClock
from hwrl.weights.transport import Cancellation, ReceiverContext, ReceiverRound, TransportReceiver, aborted_when

_HELD_S = 1.0
"""A transfer that takes longer may be held. From then on the receiver looks whether the round is over."""
_log = logging.getLogger("hwrl.weights")


class WeightIntake:
    """Receives versions of ``channel``'s link into the destination that ``make_destination`` makes for their layout.

    It does not join the link itself. The caller passes the member's number with each proposal
    (:class:`~hwrl.weights.LinkRegistrations`). A transport that queues buckets ahead has at most ``buckets`` of each
    sender under way. Use it from one thread, on one device.
    """

    def __init__(
        self,
        channel: ControlChannel,
        *,
        backend: Backend,
        make_destination: DestinationFactory,
        buckets: int = 8,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._cancellation = cancellation or Cancellation()
        self.channel = channel
        self._backend, self._make_destination, self._buckets = backend, make_destination, buckets
        self._ends: dict[str, TransportReceiver] = {}
        self._prepared: tuple[WeightLayout, Destination, Checksums] | None = None

    def prepare(self, proposal: Proposal) -> tuple[WeightLayout, Destination, Checksums]:
        """Return the proposal's layout, and the destination and checksums made for it; made again if it changes.

        Raises LayoutMismatchError if a tensor has no destination.
        """
        if self._prepared is None or self._prepared[0].hash != proposal.layout_hash:
            self._prepared = None  # free its memory before the next destination is made
            layout = self.channel.layout(proposal)
            destination = self._make_destination(layout)
            self._prepared = layout, destination, Checksums(layout, device=self._backend.device())
        return self._prepared

    def take(
        self, proposal: Proposal, member: int, *, replica: str, after: int, deadline: float, clock: StageClock
    ) -> Proposal | None:
        """Receive ``proposal``, whose transfer has begun, as ``member``; return the proposal that is complete here.

        Returns None if the sender aborted the proposal, or a newer stored version has replaced it. If a stored version
        is lost, corrupt or never completed, the stored version before it may be received instead, if its number is
        above ``after``. Blocks as long as the sender's limits allow, or until ``deadline`` for a stored version. Raises
        the errors of :meth:`~hwrl.weights.WeightReceiver.receive`.
        """
        transport = self.channel.transports[proposal.transport]
        receiving = ReceiverRound(proposal, self.channel, member, replica, self._cancellation, deadline)
        try:
            _, destination, sums = self.prepare(proposal)
        except BaseException as exc:
            if not transport.keeps_versions:  # at once, because the other receivers wait for this vote
                receiving.cast(Vote.of_error(exc))
            raise
        finished = None
        try:
            with torch.no_grad():
                if transport.keeps_versions:
                    taken = self._fetch(receiving, destination, sums, clock, after=after)
                else:
                    taken = self._take_part(receiving, destination, sums, clock)
                if taken is not None:
                    destination.finish()
                    finished = taken
        finally:
            if finished is None:
                destination.cancel()
        return finished

    def _take_part(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
    ) -> Proposal | None:
        """Take part in a two-phase commit: receive, vote, and wait for the decision."""
        end, stage = self._end_of(receiving.proposal)
        with aborted_when(receiving.is_over, end.abort, after_s=_HELD_S), clock(stage):
            try:
                vote = _receive(end, receiving, destination, sums, clock)
            except CommError as exc:
                vote = Vote.of_error(exc)
            except BaseException as exc:  # at once, because the other receivers wait for this vote
                receiving.cast(Vote.of_error(exc))
                raise
        with clock("vote"):
            receiving.cast(vote)
            decision = receiving.wait_for_decision()
        committed = decision is not None and decision.kind is DecisionKind.COMMITTED
        return receiving.proposal if committed else None

    def _fetch(
        self, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock, *, after: int
    ) -> Proposal | None:
        """Copy a stored version, even while it is being written; return None if a newer one has replaced it.

        If it is lost, corrupt or never completed, copy the one before if its number is above ``after``.
        """
        proposal = receiving.proposal
        end, stage = self._end_of(proposal)
        try:
            with clock(stage):
                vote = _receive(end, receiving, destination, sums, clock)
            if vote.kind is VoteKind.CORRUPT:
                raise TransferFailedError(
                    f"version {proposal.version} was not received",
                    why=f"the bytes received differ from those written ({vote})",
                    fix="publish it again, then receive again",
                )
            return proposal if vote.kind is VoteKind.WHOLE else None
        except TransferFailedError as exc:
            number = proposal.last_stored_number
            earlier = self.channel.proposal(number) if number > after else None
            if earlier is None:
                raise
            _log.warning("receiving version %d instead: %s", earlier.version, exc)
        return self._fetch(replace(receiving, proposal=earlier), destination, sums, clock, after=number)

    def abort(self) -> None:
        """Abort all operations under way. Any thread may call this."""
        for end in list(self._ends.values()):
            end.abort()

    def release(self, *, keep_plan: bool = False) -> None:
        """Free the destination; the next version plans and allocates it again.

        With ``keep_plan`` a destination of copies into tensors that live on keeps its plan, and frees its ring only.
        """
        if keep_plan and self._prepared is not None and isinstance(self._prepared[1], CopyDestination):
            self._prepared[1].release()
        else:
            self._prepared = None
        self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and free the destination."""
        for end in self._ends.values():
            end.close()
        self._ends, self._prepared = {}, None
        self._backend.empty_cache()

    def _end_of(self, proposal: Proposal) -> tuple[TransportReceiver, str]:
        """Return the receiving end of the proposal's transport, and the name of its stage in reports."""
        transport, name = self.channel.transports[proposal.transport], proposal.transport
        if name not in self._ends:
            self._ends[name] = transport.receiver(ReceiverContext(self.channel.store, self._backend, self._buckets))
        return self._ends[name], transport.stage


def _receive(
    end: TransportReceiver, receiving: ReceiverRound, destination: Destination, sums: Checksums, clock: StageClock
) -> Vote:
    clock.forget_spans()
    destination.begin()
    theirs = end.receive(receiving, destination, sums, clock)
    return Vote(VoteKind.TORN, "a newer version replaced it") if theirs is None else sums.compare(theirs)
