"""The receivers' side of joining a link: they register, learn of proposals, report ready, and leave.

The sender's list of all receivers is :mod:`hwrl.weights.membership`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

from hwrl.comm import Store
from hwrl.errors import CommTimeoutError, TransferFailedError
from hwrl.weights.control import ControlChannel, Note
from hwrl.weights.messages import DecisionKind, Proposal
from hwrl.weights.report import StageClock
from hwrl.weights.transport import RECEIVER_LOOK_S, Cancellation, ReceiverRound, Transport
from hwrl.weights.transports import TRANSPORTS

_CHECK_S = 0.5
"""How often :meth:`LinkRegistrations.poll` checks whether a member was excluded."""


class LinkRegistrations:
    """One process's registrations as receivers of the link ``name``, one for each name in ``replicas``.

    They join together when this is made. Each registration is a member with a number. The process that receives a
    version for a member may be another one (:class:`~hwrl.weights.intake.WeightIntake`), so this one needs no device.
    ``newest=False`` ignores the version that is already proposed. Use it from one thread, except for ``cancellation``.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str,
        replicas: Sequence[str],
        newest: bool = True,
        transports: Mapping[str, Transport] = TRANSPORTS,
        cancellation: Cancellation | None = None,
    ) -> None:
        self._cancellation = cancellation or Cancellation()
        self._abandoned = 0  # the number of the last abandonment that was read
        self.channel = ControlChannel(store, name=name, transports=transports)
        self.replicas = tuple(replicas)
        self._done = 0  # proposals up to this number were taken, aborted or ignored
        self._checked_s = -math.inf  # when poll last checked that no member is excluded
        self.numbers: tuple[int, ...] = ()
        """The members' join numbers, in the order of ``replicas``; none after :meth:`leave`."""
        self.join(newest=newest)

    def join(self, *, newest: bool = True) -> None:
        """Leave if joined, then request versions; with ``newest`` also the one that is already proposed.

        A stored version is found again this way. The device and ipc transports only send when the trainer publishes.
        """
        self.leave()
        self._done = 0 if newest else self.channel.newest()  # before joining: later proposals may be for the members
        self._abandoned = self.channel.abandonment().number
        self.numbers = self.channel.join(*self.replicas)

    def leave(self) -> None:
        """Withdraw the join requests."""
        for number in self.numbers:
            self.channel.leave(number)
        self.numbers = ()

    def keeps_versions(self, proposal: Proposal) -> bool:
        """Return whether the proposal's transport keeps versions, so that members fetch this one by themselves."""
        return self.channel.transports[proposal.transport].keeps_versions

    def poll(self) -> Proposal | None:
        """Return the newest proposal if it is new and for one of the members, else None. Never blocks.

        Costs one short store round trip while nothing is new. Raises ReceiverExcludedError within half a second after a
        member was excluded.
        """
        newest, now_s = self.channel.newest(), time.monotonic()
        if newest <= self._done and now_s - self._checked_s < _CHECK_S:
            return None
        self._check_members()
        self._checked_s = now_s
        return self._proposal_for_us(newest)

    def wait(self, *, deadline: float, timeout_s: float, aborted: Proposal | None, have: int | None) -> Proposal:
        """Wait for a proposal for one of the members. ``have`` is their version, for the error's text.

        Raises CommTimeoutError at ``deadline``, ReceiverExcludedError if a member was excluded, and CommAbortedError
        after a cancellation. Raises TransferFailedError as soon as the sender has given up on the version of proposal
        ``aborted``, or on a version that it has not proposed yet.
        """
        while True:
            self._cancellation.check()
            self._check_members()
            abandoned = self.channel.abandonment()
            newest = self.channel.newest()
            proposal = self._proposal_for_us(newest)
            before, self._abandoned = self._abandoned, abandoned.number
            if proposal is not None:
                return proposal  # usually a newer version than the abandoned one
            decision = None if aborted is None else self.channel.decision(aborted)
            if aborted is not None and decision is not None and decision.kind is DecisionKind.GIVEN_UP:
                raise _given_up(aborted.version, decision.detail)
            concerns_us = abandoned.number > before and not set(self.numbers).isdisjoint(abandoned.to)
            if concerns_us and abandoned.epoch == self.channel.epoch():
                raise _given_up(abandoned.version, abandoned.why)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                names = ", ".join(map(repr, self.replicas))
                raise CommTimeoutError(
                    f"no new version of {self.channel.name!r} was offered to {names} within {timeout_s:g} s",
                    why=f"the newest version here is {have}",
                    fix="check that the sender is alive; poll() says without waiting whether there is a version",
                )
            self.channel.wait_for_newer(newest, timeout_s=min(RECEIVER_LOOK_S, left_s))

    def begin(self, proposal: Proposal) -> int:
        """Count all proposals up to this one as handled. Return the previous limit, for :meth:`undo`."""
        after, self._done = self._done, proposal.number
        return after

    def undo(self, after: int) -> None:
        """Count the proposals after number ``after`` as new again."""
        self._done = after

    def members_of(self, proposal: Proposal) -> tuple[int | None, ...]:
        """Return, for each replica, its member number if it takes part in ``proposal``, else None."""
        if self.keeps_versions(proposal):
            return self.numbers
        return tuple(number if number in proposal.to else None for number in self.numbers)

    def rendezvous(self, proposal: Proposal, clock: StageClock | None = None) -> bool:
        """Report the members as ready and wait for the sender's answer; return whether the transfer begins.

        A stored version needs no rendezvous.
        """
        if self.keeps_versions(proposal):
            return True
        members = [pair for pair in zip(self.numbers, self.replicas, strict=True) if pair[0] in proposal.to]
        for number, _ in members:
            self.channel.write(proposal, Note.READY, member=number)
        with (clock or StageClock())("rendezvous"):
            return ReceiverRound(proposal, self.channel, *members[0], self._cancellation).wait_for_start()

    def next_deadline(self, proposal: Proposal, deadline: float) -> float:
        """Return the later deadline after the aborted ``proposal``, for the sender may need its time for the next one.

        Both are on the monotonic clock.
        """
        return max(deadline, time.monotonic() + proposal.limits.start_s)

    def _check_members(self) -> None:
        for number, name in zip(self.numbers, self.replicas, strict=True):
            self.channel.check_member(number, name)

    def _proposal_for_us(self, number: int) -> Proposal | None:
        """Return proposal ``number`` if it is new and a member takes part in it, else None.

        The epoch is not checked for a stored version. A receiver may take it from a deposed sender as long as its file
        can be opened; a newer proposal replaces it.
        """
        if number <= self._done:
            return None
        proposal = self.channel.proposal(number)
        if proposal is None or self.keeps_versions(proposal):
            return proposal
        is_ours = bool(set(self.numbers) & set(proposal.to)) and proposal.epoch == self.channel.epoch()
        return proposal if is_ours else None


def _given_up(version: int, why: str) -> TransferFailedError:
    return TransferFailedError(
        f"the sender gave up version {version}",
        why=why,
        fix="look at the sender's log; receive again after the next publish",
    )
