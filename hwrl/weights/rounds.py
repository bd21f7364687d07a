"""The sender's end of a transfer in which all receivers take part at once: offer, rendezvous, move, vote, verdict."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from hwrl.comm.store import first_line
from hwrl.errors import CommError, TransferFailedError
from hwrl.interfaces import Backend
from hwrl.weights.board import Board, Offer
from hwrl.weights.buffer import BroadcastBuffer
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import TensorFeed, WeightLayout
from hwrl.weights.report import StageClock
from hwrl.weights.roster import Roster

_log = logging.getLogger("hwrl.weights")
_ATTEMPTS_WITHOUT_CULPRIT = 3
_BEGIN_WITHIN = 4  # times timeout_s: after that no round of the same version begins
_SLACK_S = 10.0  # for what a sender does between two waits on a busy machine
_WHY_CHARACTERS = 300
_WATCH_S = 0.5

Named = Iterable[tuple[str, torch.Tensor]]


def vote_timeout_s(timeout_s: float) -> float:
    """Return what of ``timeout_s`` is kept for votes after the wire failed.

    A live receiver that learns of a lost transfer reports it within milliseconds; the rest is for a busy machine.
    """
    return min(5.0, timeout_s / 3)


def wire_timeout_s(timeout_s: float) -> float:
    """Return after how long without an end the wire is given up, at both ends, so that votes come in ``timeout_s``."""
    return timeout_s - vote_timeout_s(timeout_s)


def note_timeout_s(timeout_s: float, *, note: str) -> float:
    """Return how long a receiver waits for a sender's ``note`` on a round before it takes the sender for dead.

    Until "go" the sender may wait ``timeout_s`` for other receivers; after that, as long for the wire, and for votes.
    """
    return (1 if note == "go" else 2) * timeout_s + _SLACK_S


class Rounds:
    """Repeats rounds until each member of the roster has the version or is excluded.

    A transport says how a round moves the tensors: ``_begin`` completes the offer, ``_move`` moves (CommError: the
    round is lost), ``_break_off`` ends what a lost round left under way.
    """

    def __init__(
        self, board: Board, roster: Roster, layout: WeightLayout, *, backend: Backend, slabs: int, timeout_s: float
    ) -> None:
        self._board, self._roster, self._layout = board, roster, layout
        self._backend, self._timeout_s = backend, timeout_s
        self._buffer = BroadcastBuffer(layout, backend=backend, slabs=slabs)
        self._sums = Checksums(layout, device=backend.device())
        self._past: list[Offer] = []
        self._newest: Offer | None = None  # of the version that is being published
        self._came: set[int] = set()  # the members that came to one of its rounds
        self._trouble = ""

    def publish(self, base: Offer, named: Named, clock: StageClock) -> tuple[int, dict[str, str]]:
        """Send ``named``, which is iterated once a round, to each member that lacks the version.

        Returns how many have it now, and who was excluded, with the reason. Whatever this raises, receivers that wait
        for the version learn that it does not come.
        """
        self._newest, self._came = None, set()
        excluded: dict[str, str] = {}
        try:
            self._repeat(base, named, excluded, clock)
        except BaseException as exc:
            self._give_up(exc)
            raise
        return sum(served == base.version for served in self._roster.served.values()), excluded

    def _repeat(self, base: Offer, named: Named, excluded: dict[str, str], clock: StageClock) -> None:
        """Repeat rounds until one commits, or nobody is left to send to; what failing receivers can cost is bounded."""
        begin, fruitless, rounds = time.monotonic(), 0, 0
        passed_s = 0.0
        while fruitless < _ATTEMPTS_WITHOUT_CULPRIT and passed_s < _BEGIN_WITHIN * self._timeout_s:
            self._board.check_epoch(base.epoch)
            self._roster.refresh()
            to, blamed = self._roster.without(base.version), len(excluded)
            if passed_s >= self._timeout_s:  # others join and never come; they are served by the next publish
                to = [member for member in to if member in self._came]
            if not to:
                return
            offer = self._offer(base, to)
            if self._round(offer, named, excluded, clock):
                return
            fruitless += len(excluded) == blamed and not self._gone(offer)
            rounds, passed_s = rounds + 1, time.monotonic() - begin
        raise TransferFailedError(
            f"version {base.version} could not be sent",
            why=f"{rounds} attempts failed in {passed_s:.0f} s, {fruitless} of them although every receiver answered; "
            f"the last: {self._trouble}",
            fix="look at the connection between the machines; receivers go on with the version that they have",
        )

    def release(self) -> None:
        """Give up what the transport holds, and the buffer's memory; the next round takes both anew."""
        self._break_off()
        self._buffer.release()

    def close(self) -> None:
        """Give it up for good."""
        self._give_up(TransferFailedError("the sender was closed", why="its owner ended it", fix="make a new sender"))
        self.release()

    def _begin(self, offer: Offer) -> Offer:
        """Return ``offer`` with what the transport's receivers must know."""
        return offer

    def _move(self, offer: Offer, feed: TensorFeed, clock: StageClock) -> None:
        raise NotImplementedError

    def _break_off(self) -> None:
        raise NotImplementedError

    def _offer(self, base: Offer, to: list[int]) -> Offer:
        offer = self._begin(replace(base, number=self._board.newest() + 1, to=to))
        self._newest = offer  # before anybody can see it
        self._board.put_offer(offer)
        self._past.append(offer)
        return offer

    def _give_up(self, exc: BaseException) -> None:
        """Tell the receivers of the newest offer that ``exc`` ended this version, unless it was committed before."""
        if self._newest is not None:
            why = f"{type(exc).__name__}: {first_line(exc)[:_WHY_CHARACTERS]}"
            with contextlib.suppress(CommError):  # the store is lost, too
                self._board.give_up(self._newest, why)

    def _round(self, offer: Offer, named: Named, excluded: dict[str, str], clock: StageClock) -> bool:
        feed = TensorFeed(self._layout, named)
        try:
            return self._attempt(offer, feed, excluded, clock)
        except BaseException as exc:
            self._give_up(exc)  # receivers need not wait until the source has been read to its end
            raise
        finally:
            feed.close()

    def _attempt(self, offer: Offer, feed: TensorFeed, excluded: dict[str, str], clock: StageClock) -> bool:
        with clock("gather"):
            feed.read_ahead()  # receivers are on their way meanwhile
        with clock("rendezvous"):
            absent = self._absent(offer)
            excluded |= self._roster.exclude(absent, f"it did not come to receive within {self._timeout_s:g} s")
            self._board.say_go(offer, go=not absent)
        if absent:
            self._trouble = f"of {len(offer.to)} receivers, {len(absent)} did not come or were replaced"
            return False
        self._forget_past(offer)
        deadline = time.monotonic() + self._timeout_s
        failure = self._try_to_move(offer, feed, clock)
        with clock("vote"):
            return self._count_votes(offer, failure, excluded, deadline)

    def _absent(self, offer: Offer) -> list[int]:
        """Wait for all receivers; return those which did not come, have left, or were replaced meanwhile."""
        absent = offer.to
        for looks, absent in enumerate(self._watch(offer, "here", self._timeout_s)):
            self._came.update(member for member in offer.to if member not in absent)
            gone = self._gone(offer) if absent or looks else []
            if gone:
                return gone
        return absent

    def _watch(self, offer: Offer, note: str, timeout_s: float) -> Iterator[list[int]]:
        """Yield who has not written ``note`` yet, now and then, until that is nobody or ``timeout_s`` have passed."""
        late, waited_s = offer.to, 0.0
        while late and waited_s < timeout_s:
            slice_s = min(_WATCH_S, timeout_s - waited_s)
            late = self._board.absent(offer, late, note=note, timeout_s=slice_s)
            waited_s += slice_s
            yield late

    def _gone(self, offer: Offer) -> list[int]:
        """Return which receivers of ``offer`` have left, or were replaced, since it was made.

        Raises TransferFailedError if another sender has taken over: its receivers are not this one's to exclude.
        """
        self._board.check_epoch(offer.epoch)
        self._roster.refresh()
        return [member for member in offer.to if member not in self._roster.members]

    def _try_to_move(self, offer: Offer, feed: TensorFeed, clock: StageClock) -> CommError | None:
        try:
            with clock("wire"), torch.no_grad(), clock.span(self._backend):
                self._move(offer, feed, clock)
        except CommError as exc:
            self._break_off()
            return exc
        except BaseException as exc:
            self._give_up(exc)  # first: ending what is under way may take as long as the wire's timeout
            self._break_off()
            raise
        return None

    def _count_votes(self, offer: Offer, failure: CommError | None, excluded: dict[str, str], deadline: float) -> bool:
        patience_s = vote_timeout_s(self._timeout_s)
        if failure is None:  # the host may be ahead of the device, which is still moving
            patience_s = max(patience_s, deadline - time.monotonic())
        silent = self._await_votes(offer, patience_s)
        votes = {member: self._board.vote(offer, member) for member in offer.to if member not in silent}
        why = "it did not vote in time" if failure is None else f"it was lost in the transfer ({failure.why})"
        excluded |= self._roster.exclude(silent, why)
        for member, vote in votes.items():
            if vote.startswith("corrupt"):
                excluded |= self._roster.exclude([member], f"it received other bytes than were sent ({vote})")
        whole = [member for member, vote in votes.items() if vote == "whole"]
        torn = {self._roster.members[member]: vote for member, vote in votes.items() if vote.startswith("torn")}
        committed = bool(whole) and not torn
        if not committed or silent:
            self._break_off()
        if not committed:
            self._trouble = f"the sender's side: {failure}; the receivers' side: {torn}"
            _log.warning("version %s was not committed; %s", offer.version, self._trouble)
        self._roster.served |= dict.fromkeys(whole if committed else [], offer.version)
        self._board.put_verdict(offer, committed=committed)
        return committed

    def _await_votes(self, offer: Offer, timeout_s: float) -> list[int]:
        """Wait for all votes, and not for those who have left or were replaced; return who did not vote."""
        silent = offer.to
        for silent in self._watch(offer, "vote", timeout_s):
            if silent and set(silent) <= set(self._gone(offer)):
                break
        return silent

    def _forget_past(self, offer: Offer) -> None:
        """Delete the notes of offers that every receiver has left behind: it came to this one, or is no member."""
        waiting = self._roster.members.keys() - set(offer.to)
        done = [past for past in self._past if past is not offer and waiting.isdisjoint(past.to)]
        self._past = [past for past in self._past if past not in done]
        for past in done:
            self._board.forget(past)
        for group in {past.group for past in done} - {past.group for past in self._past}:
            self._board.forget_group(group)
