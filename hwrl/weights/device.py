"""The device transport: slab by slab, from the trainer's device to each receiver's, with no copy on the host."""

from __future__ import annotations

import collections
import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from hwrl.backend import Backend
from hwrl.comm import Comm, Group, Pending
from hwrl.errors import CommError, TransferFailedError
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import BroadcastBuffer, Staging
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster

_log = logging.getLogger("hwrl.weights")
_ATTEMPTS_WITHOUT_CULPRIT = 3
_AFTER_FAILURE_S = 5.0  # a live receiver reports a lost transfer within milliseconds; the rest is for a busy machine
_WATCH_S = 0.5


class DeviceSender:
    """The sender's end: rank 0 of a standalone group with the receivers, made anew only when they change."""

    def __init__(
        self, board: Board, roster: Roster, layout: WeightLayout, *, backend: Backend, slabs: int, timeout_s: float
    ) -> None:
        self._board, self._roster, self._layout, self._backend = board, roster, layout, backend
        self._slabs, self._timeout_s = slabs, timeout_s
        self._buffer = BroadcastBuffer(layout, backend=backend, slabs=slabs)
        self._sums = Checksums(layout, device=backend.device())
        self._group: Group | None = None
        self._group_of: list[int] = []
        self._past: Offer | None = None
        self._trouble = ""

    def publish(self, base: Offer, tensors: Sequence[torch.Tensor], clock: StageClock) -> tuple[int, dict[str, str]]:
        """Send ``tensors`` to each member that lacks the version; return how many have it now, and who was excluded."""
        excluded: dict[str, str] = {}
        fruitless = 0
        while fruitless < _ATTEMPTS_WITHOUT_CULPRIT:
            self._roster.refresh()
            to, blamed = self._roster.without(base.version), len(excluded)
            if not to or self._transfer(self._offer(base, to), tensors, excluded, clock):
                return len(self._roster.members), excluded
            fruitless += len(excluded) == blamed
        raise TransferFailedError(
            f"version {base.version} could not be sent",
            why=f"{fruitless} attempts failed although every receiver answered; the last: {self._trouble}",
            fix="look at the connection between the machines; receivers go on with the version that they have",
        )

    def close(self) -> None:
        """Close the group."""
        if self._group is not None:
            self._group.close()
        self._group = None
        self._buffer.free_all()

    def _offer(self, base: Offer, to: list[int]) -> Offer:
        number = self._board.newest() + 1
        if self._group is None or self._group_of != to:
            self.close()
        name = f"{base.epoch}.{number}" if self._group is None else self._group.name
        offer = replace(base, number=number, to=to, group=name)
        self._board.put_offer(offer)
        return offer

    def _transfer(
        self, offer: Offer, tensors: Sequence[torch.Tensor], excluded: dict[str, str], clock: StageClock
    ) -> bool:
        with clock("rendezvous"):
            absent = self._absent(offer)
            excluded |= self._roster.exclude(absent, f"it did not come to receive within {self._timeout_s:g} s")
            self._board.say_go(offer, go=not absent)
        if absent:
            return False
        self._forget_past(offer)
        failure = self._send(offer, tensors, clock)
        with clock("vote"):
            return self._count_votes(offer, failure, excluded)

    def _absent(self, offer: Offer) -> list[int]:
        """Wait for all receivers; return those which did not come, have left, or were replaced meanwhile."""
        absent, waited_s = offer.to, 0.0
        while waited_s < self._timeout_s:
            slice_s = min(_WATCH_S, self._timeout_s - waited_s)
            absent = self._board.absent(offer, absent, note="here", timeout_s=slice_s)
            waited_s += slice_s
            if not absent:
                return []
            self._roster.refresh()
            if any(member not in self._roster.members for member in absent):
                return [member for member in absent if member not in self._roster.members]
        return absent

    def _send(self, offer: Offer, tensors: Sequence[torch.Tensor], clock: StageClock) -> CommError | None:
        try:
            with clock("wire"):
                self._broadcast(self._group_for(offer), tensors, clock)
        except CommError as exc:
            self.close()
            return exc
        except BaseException:  # whatever ended the sending, the receivers must not wait for the rest
            self.close()
            self._board.put_verdict(offer, committed=False)
            raise
        return None

    def _group_for(self, offer: Offer) -> Group:
        if self._group is None:
            self._group = Comm(self._backend).standalone_group(
                self._board.store, rank=0, size=1 + len(offer.to), name=offer.group, timeout_s=self._timeout_s
            )
            self._group_of = offer.to
        return self._group

    def _broadcast(self, group: Group, tensors: Sequence[torch.Tensor], clock: StageClock) -> None:
        under_way: collections.deque[Pending] = collections.deque()
        for index in range(len(self._layout.slabs)):
            with clock("pack"):
                lease = self._buffer.lease(index, tensors)
            pending = group.broadcast(lease.memory, src=0, async_op=True)
            lease.in_use_until(pending)
            under_way.append(pending)
            self._sums.add(index, lease.memory)
            if len(under_way) >= self._slabs:
                under_way.popleft().wait()
        for pending in under_way:
            pending.wait()
        group.broadcast(self._sums.values, src=0)

    def _count_votes(self, offer: Offer, failure: CommError | None, excluded: dict[str, str]) -> bool:
        patience_s = self._timeout_s if failure is None else min(self._timeout_s, _AFTER_FAILURE_S)
        silent = self._board.absent(offer, offer.to, note="vote", timeout_s=patience_s)
        votes = {member: self._board.vote(offer, member) for member in offer.to if member not in silent}
        why = "it did not vote in time" if failure is None else f"it was lost in the transfer ({failure.why})"
        excluded |= self._roster.exclude(silent, why)
        for member, vote in votes.items():
            if vote.startswith("corrupt"):
                excluded |= self._roster.exclude([member], f"it received other bytes than were sent ({vote})")
        whole = [member for member, vote in votes.items() if vote == "whole"]
        torn = {self._roster.members[member]: vote for member, vote in votes.items() if vote.startswith("torn")}
        committed = bool(whole) and not torn
        if not committed:
            self.close()
            self._trouble = f"the sender's side: {failure}; the receivers' side: {torn}"
            _log.warning("version %s is sent again; %s", offer.version, self._trouble)
        self._roster.served |= dict.fromkeys(whole if committed else [], offer.version)
        self._board.put_verdict(offer, committed=committed)
        return committed

    def _forget_past(self, offer: Offer) -> None:
        """Delete the last offer's notes: every receiver of this one has left it behind."""
        if self._past is not None:
            self._board.forget(self._past)
        self._past = offer


class DeviceReceiver:
    """A receiver's end: receives into one of two stagings while the other holds the version that serves."""

    def __init__(self, board: Board, *, backend: Backend, slabs: int, timeout_s: float) -> None:
        self._board, self._backend, self._slabs, self._timeout_s = board, backend, slabs, timeout_s
        self._group: Group | None = None

    def receive(self, offer: Offer, member: int, staging: Staging, sums: Checksums) -> str:
        """Receive ``offer`` into ``staging``; return the vote: "whole", "corrupt …" or "torn …"."""
        try:
            theirs = self._receive_slabs(self._group_for(offer, member), staging, sums)
        except CommError as exc:
            self.close()
            return f"torn: {exc.what}"
        except BaseException:  # the group is out of step, whatever ended the receiving
            self.close()
            raise
        wrong = sums.differing(theirs)
        return f"corrupt: slabs {wrong[:8]} of {len(staging.slabs)}" if wrong else "whole"

    def close(self) -> None:
        """Close the group."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def _group_for(self, offer: Offer, member: int) -> Group:
        if self._group is None or self._group.name != offer.group:
            self.close()
            self._group = Comm(self._backend).standalone_group(
                self._board.store,
                rank=1 + offer.to.index(member),
                size=1 + len(offer.to),
                name=offer.group,
                timeout_s=self._timeout_s,
            )
        return self._group

    def _receive_slabs(self, group: Group, staging: Staging, sums: Checksums) -> torch.Tensor:
        under_way: collections.deque[tuple[int, Pending]] = collections.deque()
        for index, raw in enumerate(staging.slabs):
            under_way.append((index, group.broadcast(raw, src=0, async_op=True)))
            if len(under_way) >= self._slabs:
                self._land(under_way, staging, sums)
        while under_way:
            self._land(under_way, staging, sums)
        theirs = torch.empty_like(sums.values)
        group.broadcast(theirs, src=0)
        return theirs

    def _land(self, under_way: collections.deque[tuple[int, Pending]], staging: Staging, sums: Checksums) -> None:
        index, pending = under_way.popleft()
        pending.wait()
        sums.add(index, staging.slabs[index])
