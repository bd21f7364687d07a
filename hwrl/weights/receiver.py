"""A rollout replica's end of a weight link: :class:`WeightReceiver`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommTimeoutError, LayoutMismatchError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.control import ControlChannel, DecisionKind, Limits, Proposal
from hwrl.weights.destination import Destination, DoubleBuffer
from hwrl.weights.participant import Participant
from hwrl.weights.report import StageClock
from hwrl.weights.transport import ReceiverContext, ReceiverRound, ReceiverTiming, Transport, TransportReceiver
from hwrl.weights.transports import TRANSPORTS

_TIMING = ReceiverTiming()
_CHECK_S = 0.5
"""How often a receiver that waits for news looks whether it was excluded."""


class Received(Mapping[str, torch.Tensor]):
    """A whole, verified version: names → tensors on this process's device, in the sender's order.

    The tensors are the receiver's memory. They stay unchanged until the next ``receive`` returns; the ``receive``
    after that overwrites them, so copy what must live longer. Received ``into`` given tensors, they are those tensors,
    and the next ``receive`` changes them.
    """

    def __init__(self, proposal: Proposal, tensors: Mapping[str, torch.Tensor], nbytes: int, clock: StageClock) -> None:
        self.version, self.metadata, self.nbytes = proposal.version, proposal.metadata, nbytes
        self.seconds: Mapping[str, float] = clock.seconds
        """The host's seconds, by stage."""
        self.transfer_s = clock.span_s()
        """The seconds between the first and the last byte, measured on the device."""
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class WeightReceiver:
    """A rollout replica's end of the link ``name``. It joins when it is made, and uses the sender's transport.

    Without ``into`` it holds memory for two versions: the old one serves until the new one is whole. With ``into``
    (names → tensors on this process's device, at least those that are sent) each version is received into these
    tensors, and a ring of ``slabs`` slabs is held for small ones. The old version is then lost when a transfer begins:
    :attr:`version` is None, and the tensors must not be used, until a transfer succeeds.

    ``newest=False`` ignores the version that is already proposed and waits for later ones. Use it from one thread. A
    restarted replica replaces its namesake. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        replica: str,
        backend: Backend | None = None,
        into: Mapping[str, torch.Tensor] | None = None,
        slabs: int = 4,
        newest: bool = True,
        timing: ReceiverTiming = _TIMING,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        self._backend = backend_or_default(backend)
        payloads = {key: transport.payload for key, transport in transports.items()}
        self._channel = ControlChannel(store, name=name, payloads=payloads)
        self.replica = replica
        self.version: int | None = None
        """The version that is whole here; None before the first, and after a failed transfer ``into`` tensors."""
        self._done: int  # proposals up to this number were taken, aborted or ignored
        self._checked_s = -math.inf  # when this receiver was last found not to be excluded
        self._into, self._slabs, self._timing = into, slabs, timing
        self._buffer: DoubleBuffer | None = None
        self._transports = transports
        self._ends: dict[str, TransportReceiver] = {}
        self._join(newest=newest)

    def __enter__(self) -> WeightReceiver:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def join(self) -> None:
        """Request versions again, the newest included: after ReceiverExcludedError, or when the weights were lost."""
        for end in self._ends.values():
            end.abort()
        self._channel.leave(self._member)
        self._join(newest=True)

    def _join(self, *, newest: bool) -> None:
        self._done = 0 if newest else self._channel.newest()  # before joining: later proposals may be for this one
        self._member = self._channel.join(self.replica)

    def release(self) -> None:
        """Free the memory of the received versions, which must not be used later; the next version allocates anew."""
        self._buffer = None
        self._backend.empty_cache()

    def poll(self) -> int | None:
        """Return the proposed version if this receiver lacks it, or None; never blocks.

        Costs one short store round trip while nothing is new. Raises ReceiverExcludedError if this receiver was
        excluded; if nothing is new, half a second after that at most.
        """
        newest, now_s = self._channel.newest(), time.monotonic()
        if newest <= self._done and now_s - self._checked_s < _CHECK_S:
            return None
        self._channel.check_member(self._member, self.replica)
        self._checked_s = now_s
        proposal = self._proposal_for_me(newest)
        return None if proposal is None else proposal.version

    def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Block until the newest proposed version is committed here, and return it.

        Raises CommTimeoutError if nothing is proposed within ``timeout_s``, or if a stored version (host transport) is
        not whole by then. For the other transports the limits follow from the sender's ``timeout_s``: this receiver
        waits as long as the sender may wait for others. Raises TransferFailedError if the version did not commit:
        the sender gave up, which is known at once, or is silent beyond its limits. The old version stays valid, unless
        it was received ``into`` tensors. Raises ReceiverExcludedError if this receiver was excluded; ``join`` again.
        """
        deadline, aborted = time.monotonic() + timeout_s, None
        while True:
            clock = StageClock()
            with clock("wait"):
                proposal = self._wait_for_proposal(deadline, timeout_s, aborted)
            buffer = self._buffer_for(proposal)
            after, self._done = self._done, proposal.number
            try:
                taken = self._take(proposal, buffer, after, deadline, clock)
            except CommTimeoutError:
                self._done = after  # it is still being written
                raise
            if taken is not None:
                tensors = buffer.flip()
                self.version = taken.version
                return Received(taken, tensors, buffer.layout.payload_nbytes, clock)
            if not self._transports[proposal.transport].keeps_versions:
                aborted = proposal  # the sender may take its time for the next round, too
                limits = Limits(proposal.timeout_s, self._timing.slack_s)
                deadline = max(deadline, time.monotonic() + limits.start_s)

    def close(self) -> None:
        """Leave the link and free the memory; received tensors must not be used later."""
        self._channel.leave(self._member)
        for end in self._ends.values():
            end.close()
        self._ends = {}
        self.release()

    def _proposal_for_me(self, number: int) -> Proposal | None:
        """Return proposal ``number`` if it is new and this receiver may take it."""
        if number <= self._done:
            return None
        proposal = self._channel.proposal(number)
        if proposal is None or self._transports[proposal.transport].keeps_versions:
            return proposal
        is_mine = self._member in proposal.to and proposal.epoch == self._channel.epoch()
        return proposal if is_mine else None

    def _wait_for_proposal(self, deadline: float, timeout_s: float, aborted: Proposal | None) -> Proposal:
        """Wait for a proposal. Raises at once if the sender gave up after ``aborted``."""
        while True:
            self._channel.check_member(self._member, self.replica)
            newest = self._channel.newest()
            proposal = self._proposal_for_me(newest)
            if proposal is not None:
                return proposal
            if aborted is not None:
                self._check_not_given_up(aborted)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise CommTimeoutError(
                    f"no new version of {self._channel.name!r} was offered to {self.replica!r} within {timeout_s:g} s",
                    why=f"its newest version is {self.version}",
                    fix="is the sender alive? poll() tells without waiting whether there is a version",
                )
            self._channel.wait_for_proposal(newest + 1, timeout_s=min(self._timing.look_s, left_s))

    def _check_not_given_up(self, aborted: Proposal) -> None:
        decision = self._channel.decision(aborted)
        if decision is not None and decision.kind is DecisionKind.GIVEN_UP:
            raise TransferFailedError(
                f"the sender gave version {aborted.version} up",
                why=decision.detail,
                fix="look at the sender's log; this receiver continues with the version that it has",
            )

    def _take(
        self, proposal: Proposal, buffer: DoubleBuffer, after: int, deadline: float, clock: StageClock
    ) -> Proposal | None:
        def begin() -> Destination:
            if self._into is not None:
                self.version = None  # from here on the tensors may hold a mixture
            return buffer.spare()

        transport = self._transports[proposal.transport]
        receiving = ReceiverRound(
            proposal=proposal,
            channel=self._channel,
            member=self._member,
            replica=self.replica,
            layout=buffer.layout,
            timing=self._timing,
            deadline=deadline,
        )
        participant = Participant(transport, self._end_of(proposal.transport), begin=begin)
        return participant.take(receiving, buffer.sums, clock, after=after)

    def _end_of(self, transport: str) -> TransportReceiver:
        if transport not in self._ends:
            context = ReceiverContext(self._channel.store, self._backend, self._slabs)
            self._ends[transport] = self._transports[transport].receiver(context)
        return self._ends[transport]

    def _buffer_for(self, proposal: Proposal) -> DoubleBuffer:
        if self._buffer is None or self._buffer.layout.hash != proposal.layout:
            self._buffer = None  # free the old memory first
            try:
                layout = self._channel.layout(proposal)
                self._buffer = DoubleBuffer(layout, backend=self._backend, into=self._into, slabs=self._slabs)
            except LayoutMismatchError:
                self._channel.leave(self._member)  # the sender need not wait for a receiver that cannot receive
                raise
        return self._buffer
