"""The sender's side of a commit: a two-phase commit with all receivers, or storing a version for later.

The first phase of the two-phase commit (prepare) has the proposal, the rendezvous, the transfer and the votes. The
second phase is the decision. Unlike the textbook's, the commit is not unanimous: receivers that are silent or got
corrupt bytes are excluded, and the version commits for the others.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from hwrl.comm import Group
from hwrl.errors import CommError, TransferFailedError, in_one_line
from hwrl.weights.buckets import ChangedSums, TensorReader
from hwrl.weights.control import ControlChannel, Note
from hwrl.weights.membership import Membership
from hwrl.weights.messages import DecisionKind, Proposal, VoteKind
from hwrl.weights.ranks import Reports, read_together
from hwrl.weights.report import StageClock
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.source import WeightSource
from hwrl.weights.transport import SenderContext, SenderRound, Transport

_log = logging.getLogger("hwrl.weights")
_ROUNDS_WITHOUT_CULPRIT = 3
_BEGIN_WITHIN = 4  # times timeout_s: no round of a version begins later than this


@dataclass(frozen=True)
class OutgoingVersion:
    """A version to send. ``to`` names the receivers; None means all that have joined.

    ``content`` is a serial number of this set of tensor values. Publishing the newest version again keeps it, so
    receivers that have it are skipped.
    """

    version: int
    content: int
    metadata: dict[str, str | int | float]
    source: WeightSource
    to: Collection[str] | None = None


CommitOutcome = tuple[int, dict[str, str], tuple[str, ...]]
"""The number of receivers with the version, the reason for each replica that was excluded or has not joined, and the
members that are left out: they are still in the link, and get the next version.

A receiver counts if it has voted "whole". Of a stored version all members count.
"""


class SenderLink:
    """What a sender keeps from one version to the next: its channel, membership, layout and transport.

    ``name`` is the transport's name in proposals. Several senders are ranks of ``group``.
    """

    def __init__(
        self,
        channel: ControlChannel,
        membership: Membership,
        context: SenderContext,
        *,
        name: str,
        transport: Transport,
        group: Group | None = None,
    ) -> None:
        self.channel, self.membership, self.transport, self.layout = channel, membership, transport, context.layout
        self.end = transport.sender(context)
        self.epoch, self.limits = context.epoch, context.limits
        ranks = sender_ranks(context.senders, 1 if group is None else group.size)
        self._group, self._shares = group, Shares(context.layout, ranks) if len(ranks) > 1 else None
        self.reports = Reports(ranks, context.limits)
        self.stored_number = 0
        """The number of the last proposal whose version was stored completely, if the transport keeps versions."""
        self.committed: tuple[int, int] | None = None
        """The number and the content of the newest version that was committed or stored."""
        self.changed_share: float | None = None
        """The share of its checksums that differ from the version before; 1.0 if there is none, None if unknown."""
        self._sums, self._has_warned = ChangedSums(), False
        self._name = name
        self.proposals: list[Proposal] = []
        """Those whose messages are in the store."""

    def draft(self, outgoing: OutgoingVersion, to: Sequence[int], clock: StageClock) -> Proposal:
        """Return the next proposal. Receivers do not see it yet."""
        number = self.channel.reserve_number(self.epoch)
        return Proposal(
            number=number,
            epoch=self.epoch,
            version=outgoing.version,
            transport=self._name,
            layout_hash=self.layout.hash,
            to=tuple(to),
            timeout_s=self.limits.timeout_s,
            last_stored_number=self.stored_number,
            metadata=outgoing.metadata,
            payload=self.end.prepare(number, tuple(to), clock),
            senders=1 if self._shares is None else len(self._shares.ranks),
        )

    def reader(self, source: WeightSource, *, number: int = 0) -> TensorReader:
        """Return a reader of this sender's tensors. Its first read begins that of the other ranks.

        ``number`` is that of the proposal. What rank 0 holds is read by it alone, unless others send, too.
        """
        group, shares = self._group, self._shares
        if group is not None and (shares is not None or not source.holds_tensors):
            gatherers = None if shares is None else shares.gatherers
            read = functools.partial(read_together, group, source, number=number, gatherers=gatherers)
            source = WeightSource.of_known_layout(read)
        return TensorReader(self.layout, source, shares=shares)

    def forget_proposals_before(self, proposal: Proposal) -> None:
        """Delete the messages of earlier proposals, unless a receiver may still wait for one.

        Receivers of ``proposal`` no longer wait for earlier ones, and those that have left the link never do.
        """
        waiting = self.membership.members.keys() - set(proposal.to)
        kept, done = list[Proposal](), list[Proposal]()
        for past in self.proposals:
            (done if past is not proposal and waiting.isdisjoint(past.to) else kept).append(past)
        self.proposals = kept
        for past in done:
            self.channel.forget(past)
        self.end.forget([past.payload for past in done], kept=[past.payload for past in kept])

    def note_committed(
        self, outgoing: OutgoingVersion, sums: torch.Tensor | None, of_others: Sequence[int | None] = ()
    ) -> None:
        """Compare the checksums of ``outgoing`` with the version before. One warning says if all are the same."""
        before, self.committed = self.committed, (outgoing.version, outgoing.content)
        changed = [None if sums is None else self._sums.count(self.layout, sums), *of_others]
        if before is not None and before[1] == outgoing.content:  # sent again, to further receivers
            return
        counted = [count for count in changed if count is not None]
        self.changed_share = 1.0 if before is None else None
        if before is not None and sums is not None and len(sums) and len(counted) == len(changed):
            self.changed_share = sum(counted) / len(sums)
        if before is not None and self.changed_share == 0.0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "version %s of %r has the same bits as version %s. Unless that step changed nothing on purpose: does "
                "the optimizer step the tensors that are sent, with a learning rate above 0, and are an adapter's "
                "tensors among them, or merged into them? changed_share tells of every version; this is said once",
                outgoing.version,
                self.channel.name,
                before[0],
            )

    def release(self) -> None:
        """Close connections and free device memory; the next version opens and allocates them again."""
        self.end.abort()
        self.end.release()

    def close(self) -> None:
        """Free everything. If the last proposal was not committed, tell its receivers that none follows.

        Receivers that wait for a version after a committed one are not told.
        """
        if self.proposals and not self.transport.keeps_versions:
            with contextlib.suppress(CommError):  # if the store is lost, too, nobody can be told
                self.channel.give_up(self.proposals[-1], "the sender was closed")
        self.release()
        self.end.close()


def commit(link: SenderLink, outgoing: OutgoingVersion, clock: StageClock) -> CommitOutcome:
    """Commit ``outgoing`` with its receivers, or store it if the transport keeps versions."""
    if link.transport.keeps_versions:
        return store_version(link, outgoing, clock)
    return Transaction(link, outgoing, clock).run()


def store_version(link: SenderLink, outgoing: OutgoingVersion, clock: StageClock) -> CommitOutcome:
    """Store ``outgoing`` for receivers to fetch. Waits only if they are reading all older files.

    The outcome counts the receivers that had joined. If writing fails, the version before stays available.
    """
    reader = link.reader(outgoing.source)
    try:
        with clock("gather"), torch.no_grad():
            reader.read_ahead()
        link.membership.refresh()
        receivers = len(link.membership.members)
        proposal = link.draft(outgoing, (), clock)
        link.channel.check_epoch(link.epoch)  # planning and reading may have taken long
        link.channel.propose(proposal)
        link.proposals.append(proposal)
        sending = SenderRound(proposal, link.channel, link.membership)
        try:
            with clock(link.transport.stage), torch.no_grad():
                link.note_committed(outgoing, link.end.send(sending, reader, clock))
        finally:
            link.end.end_round(sending)
    finally:
        reader.close()
    link.forget_proposals_before(proposal)
    link.stored_number = proposal.number
    return receivers, {}, ()


class Transaction:
    """The two-phase commit of one version, over the transport of ``link``. The coordinator of the commit.

    A round proposes the version to all wanted members that lack it, waits until they are ready, sends, and collects
    their votes. Members that are late, silent, got corrupt bytes or failed by themselves are excluded; late new members
    are postponed. The round commits if at least one vote is "whole" and none is "torn". So a broken transfer on the
    sender's side does not abort the round by itself: it commits if receivers have got all bytes. Otherwise another
    round follows. Any other error on the sender's side gives the version up.
    """

    def __init__(self, link: SenderLink, outgoing: OutgoingVersion, clock: StageClock) -> None:
        self._link, self._outgoing, self._clock = link, outgoing, clock
        self._proposal: Proposal | None = None  # of the newest round
        self._seen: set[int] = set()  # members that were ready in some round
        self._postponed: set[int] = set()  # new members that do not get this version
        self._excluded: dict[str, str] = {}
        self._failed: set[str] = set()  # names that failed: they get a later version, also if they join again
        self._names: dict[int, str] = {}  # of the members so far, also if they have left since
        self._last_failure = ""
        self._sums: torch.Tensor | None = None  # of the newest round
        self._source_consumed = False  # whether the source was read and cannot be read again

    def run(self) -> CommitOutcome:
        """Repeat rounds until one commits, or no member is left to propose to.

        If this raises, waiting receivers get the reason at once.
        """
        try:
            self._repeat_rounds()
        except BaseException as exc:
            self.give_up(exc)
            raise
        membership, content = self._link.membership, self._outgoing.content
        lacking = membership.names_of(membership.lacking(content, self._outgoing.to))
        return list(membership.served.values()).count(content), self._excluded, lacking

    def give_up(self, exc: BaseException) -> None:
        """Tell the receivers that ``exc`` has ended this version; does nothing if it was committed."""
        if self._proposal is not None:
            with contextlib.suppress(CommError):  # if the store is lost, too, nobody can be told
                self._link.channel.give_up(self._proposal, in_one_line(exc))

    def _repeat_rounds(self) -> None:
        """Run rounds until one commits or no member is left. Failing receivers cost a bounded time."""
        # without_culprit counts the rounds after which no new name was excluded, and nobody was postponed or gone
        begin, without_culprit, rounds = time.monotonic(), 0, 0
        passed_s, timeout_s = 0.0, self._link.limits.timeout_s
        if self._outgoing.to is not None:
            self._link.membership.refresh()
            self._excluded |= dict.fromkeys(self._link.membership.absent(self._outgoing.to), "it has not joined")
        while without_culprit < _ROUNDS_WITHOUT_CULPRIT and passed_s < _BEGIN_WITHIN * timeout_s:
            self._link.channel.check_epoch(self._link.epoch)
            self._link.membership.refresh()
            to = self._awaited(passed_s)
            blamed = len(self._excluded) + len(self._postponed)
            if not to:
                return
            proposal = self._link.draft(self._outgoing, to, self._clock)
            self._proposal = proposal  # before a receiver can see it, so that give_up reaches this receiver
            self._names |= self._link.membership.members
            self._link.channel.propose(proposal)
            self._link.proposals.append(proposal)
            sending = SenderRound(proposal, self._link.channel, self._link.membership)
            if self._run_round(sending):
                return
            if self._source_consumed:
                raise TransferFailedError(
                    f"version {self._outgoing.version} could not be sent again: its weights can be read only once",
                    why=f"the transfer broke; {self._last_failure}",
                    fix="publish it again with a new iterator, or use a WeightSource that can be read several times",
                )
            without_culprit += len(self._excluded) + len(self._postponed) == blamed and not sending.gone()
            rounds, passed_s = rounds + 1, time.monotonic() - begin
        raise TransferFailedError(
            f"version {self._outgoing.version} could not be sent",
            why=f"{rounds} attempts failed in {passed_s:.0f} s, {without_culprit} of them although every receiver "
            f"answered; the last: {self._last_failure}",
            fix="look at the last failure and at the receivers' logs, then publish again",
        )

    def _awaited(self, passed_s: float) -> list[int]:
        """Return the members to propose the version to, ``passed_s`` seconds after the first proposal.

        After the patience for new members it leaves out new members that were never ready. After ``timeout_s`` it
        leaves out all members that were never ready. Those left out are neither excluded nor postponed.
        """
        link = self._link
        to = [
            one
            for one in link.membership.lacking(self._outgoing.content, self._outgoing.to)
            if one not in self._postponed and link.membership.members.get(one) not in self._failed
        ]
        new = link.membership.new_among(to)
        if passed_s >= link.limits.timeout_s:
            new = set(to)
        late = passed_s >= link.limits.patience_s
        return [member for member in to if not (late and member in new) or member in self._seen]

    def _run_round(self, sending: SenderRound) -> bool:
        """Return whether the version was committed."""
        reader = self._link.reader(self._outgoing.source, number=sending.proposal.number)
        try:
            return self._rendezvous(sending, reader) and self._send_and_decide(sending, reader)
        except BaseException as exc:
            self.give_up(exc)  # before the source is read to its end, which may take long
            raise
        finally:
            self._source_consumed = self._outgoing.source.one_shot and reader.begun
            reader.close()
            self._link.end.end_round(sending)
            self._link.reports.forget(sending)

    def _rendezvous(self, sending: SenderRound, reader: TensorReader) -> bool:
        """Wait until all receivers are ready, and return True. Otherwise exclude the late ones and return False."""
        proposal, timeout_s = sending.proposal, self._link.limits.timeout_s
        with self._clock("gather"), torch.no_grad():
            reader.read_ahead()  # meanwhile the receivers get ready
        with self._clock("rendezvous"):
            new, began_s = self._link.membership.new_among(proposal.to), time.monotonic()
            late = sending.wait_for_ready(timeout_s, new=new, patience_s=self._link.limits.patience_s)
            self._seen |= sending.seen
            silent: Sequence[int] = late
            if late and new.issuperset(late):
                names, silent = self._link.membership.postpone(late, since_s=began_s, limit_s=timeout_s)
                self._postponed.update(late)
                for name in names:
                    _log.warning("version %s is sent without the new receiver %r", self._outgoing.version, name)
            self._exclude(silent, f"it was not ready to receive within {timeout_s:g} s")
            if not late:
                self._link.membership.note_at_risk(proposal.to)
                self._link.channel.write(proposal, Note.START)
        if late:
            self._link.channel.decide(proposal, DecisionKind.AGAIN)
            self._last_failure = f"{len(late)} of {len(proposal.to)} receivers were not ready or were replaced"
            return False
        self._link.forget_proposals_before(proposal)
        return True

    def _send_and_decide(self, sending: SenderRound, reader: TensorReader) -> bool:
        """Transfer the tensors, collect the votes and decide; return whether the version was committed."""
        deadline = time.monotonic() + self._link.limits.timeout_s
        failure = self._send(sending, reader)
        with self._clock("vote"):
            patience_s = self._link.limits.votes_s
            # The device may still be sending what the host has queued, or receivers wait to connect with a lost one.
            if failure is None or sending.gone():
                patience_s = max(patience_s, deadline - time.monotonic())
            broken_s = self._link.limits.votes_s
            silent = sending.wait_for_votes(patience_s, on_broken=self._link.end.abort, broken_s=broken_s)
            return self._decide(sending, silent, failure)

    def _send(self, sending: SenderRound, reader: TensorReader) -> tuple[str, str] | None:
        """Return why the transfer broke on the sender's side, and the whole error; None if it did not."""
        link = self._link
        self._clock.forget_spans()
        try:
            with self._clock(link.transport.stage), torch.no_grad():
                self._sums = link.end.send(sending, reader, self._clock)
                link.reports.wait_until_sent(sending)
        except CommError as exc:
            link.end.abort()
            if reader.begun:  # otherwise the other senders were not told of the round
                link.reports.stop(sending)
            return exc.why, str(exc)  # as text: an exception's traceback would keep the tensors alive
        except BaseException as exc:
            self.give_up(exc)  # before the abort, which may take as long as the transport's timeout
            link.end.abort()
            raise
        return None

    def _decide(self, sending: SenderRound, silent: Sequence[int], failure: tuple[str, str] | None) -> bool:
        link, proposal = self._link, sending.proposal
        votes = sending.votes(but=silent)
        torn = {member: vote.detail for member, vote in votes.items() if vote.kind is VoteKind.TORN}
        broken = failure[0] if failure is not None else next(iter(torn.values()), "")
        self._exclude(silent, f"it was lost in the transfer ({broken})" if broken else "it did not vote in time")
        for member, vote in votes.items():
            if vote.kind is VoteKind.CORRUPT:
                self._exclude([member], f"it received other bytes than were sent ({vote})")
            elif vote.kind is VoteKind.FAILED:
                name, why = self._names.get(member, str(member)), f"it failed: {vote.detail}"
                self._exclude([member], why)
                self._excluded[name] = why  # also if it has joined again meanwhile
                self._failed.add(name)
        whole = [member for member, vote in votes.items() if vote.kind is VoteKind.WHOLE]
        names = link.membership.members
        committed = bool(whole) and not torn
        if not committed or silent:
            link.end.abort()
        if not committed:
            theirs = {names.get(member, str(member)): why for member, why in torn.items()}
            ours = None if failure is None else failure[1]
            self._last_failure = f"on the sender's side: {ours}; on the receivers' side: {theirs}"
            _log.warning("version %s was not committed; %s", self._outgoing.version, self._last_failure)
        if committed:
            link.membership.note_committed(whole, self._outgoing.content)
        link.channel.decide(proposal, DecisionKind.COMMITTED if committed else DecisionKind.AGAIN)
        sending.votes_counted = True
        if committed:
            link.note_committed(self._outgoing, self._sums, link.reports.changed(sending))
        return committed

    def _exclude(self, members: Sequence[int], why: str) -> None:
        if members:
            self._excluded |= self._link.membership.exclude(members, why)
