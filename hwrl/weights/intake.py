"""Receives the bytes of a proposed version for one member of a link, verifies them, and votes."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hwrl.comm import Store
from hwrl.interfaces import Backend
from hwrl.weights.control import ControlChannel
from hwrl.weights.destination import ChapteredDestination, DestinationFactory
from hwrl.weights.layout import WeightLayout
from hwrl.weights.messages import Proposal, Vote
from hwrl.weights.participant import Participant
from hwrl.weights.report import StageClock
from hwrl.weights.slabs import Checksums
from hwrl.weights.transport import (
    Cancellation,
    ReceiverContext,
    ReceiverRound,
    ReceiverTiming,
    Transport,
    TransportReceiver,
)
from hwrl.weights.transports import TRANSPORTS


class WeightIntake:
    """Receives versions of the link ``name`` into the destination that ``make_destination`` makes for their layout.

    It does not join the link itself. The caller passes the member's number with each proposal
    (:class:`~hwrl.weights.LinkRegistrations`). A transport that queues slabs ahead has at most ``slabs`` of each sender
    under way. Use it from one thread, on one device.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        backend: Backend,
        make_destination: DestinationFactory,
        slabs: int = 8,
        timing: ReceiverTiming,
        transports: Mapping[str, Transport] = TRANSPORTS,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._cancellation = cancellation or Cancellation()
        payloads = {key: transport.payload for key, transport in transports.items()}
        self._channel = ControlChannel(store, name=name, payloads=payloads)
        self._backend, self._make_destination, self._slabs = backend, make_destination, slabs
        self._timing, self._transports = timing, transports
        self._ends: dict[str, TransportReceiver] = {}
        self._prepared: tuple[WeightLayout, ChapteredDestination, Checksums] | None = None

    def proposal(self, number: int) -> Proposal | None:
        """Return proposal ``number``, or None if its messages were deleted."""
        return self._channel.proposal(number)

    def prepare(self, proposal: Proposal) -> ChapteredDestination:
        """Return the destination for the proposal's version, made again whenever the layout changes.

        Raises LayoutMismatchError if a tensor has no destination.
        """
        return self._prepare(proposal)[1]

    def take(
        self, proposal: Proposal, member: int, *, replica: str, after: int, deadline: float, clock: StageClock
    ) -> Proposal | None:
        """Receive ``proposal``, whose transfer has begun, as ``member``; return the proposal that is complete here.

        Returns None if the sender aborted the proposal, or a newer stored version has replaced it. If a stored version
        is lost, corrupt or never completed, the stored version before it may be received instead, if its number is
        above ``after``. Blocks as long as the sender's limits allow, or until ``deadline`` for a stored version. Raises
        the errors of :meth:`~hwrl.weights.WeightReceiver.receive`.
        """
        transport = self._transports[proposal.transport]
        try:
            layout, destination, sums = self._prepare(proposal)
        except BaseException as exc:
            if not transport.keeps_versions:  # at once, because the other receivers wait for this vote
                self._channel.cast_vote(proposal, member, Vote.of_error(exc))
            raise
        receiving = ReceiverRound(
            proposal, self._channel, member, replica, self._timing, self._cancellation, layout, deadline
        )
        participant = Participant(
            transport, self._end_of(proposal.transport), destination, device=self._backend.device()
        )
        try:
            taken = participant.take(receiving, sums, clock, after=after)
            if taken is not None:
                with torch.no_grad():
                    destination.finish()
        except BaseException:
            destination.cancel()
            raise
        if taken is None:
            destination.cancel()
        return taken

    def abort(self) -> None:
        """Abort all operations under way. Any thread may call this."""
        for end in list(self._ends.values()):
            end.abort()

    def release(self) -> None:
        """Free the destination; the next version plans and allocates it again."""
        self._prepared = None
        self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and free the destination."""
        for end in self._ends.values():
            end.close()
        self._ends = {}
        self.release()

    def _prepare(self, proposal: Proposal) -> tuple[WeightLayout, ChapteredDestination, Checksums]:
        if self._prepared is None or self._prepared[0].hash != proposal.layout_hash:
            self._prepared = None  # free its memory before the next destination is made
            layout = self._channel.layout(proposal)
            destination = ChapteredDestination(layout, self._make_destination(layout), self._make_destination)
            self._prepared = layout, destination, Checksums(layout, device=self._backend.device())
        return self._prepared

    def _end_of(self, transport: str) -> TransportReceiver:
        if transport not in self._ends:
            context = ReceiverContext(self._channel.store, self._backend, self._slabs)
            self._ends[transport] = self._transports[transport].receiver(context)
        return self._ends[transport]
