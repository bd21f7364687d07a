"""A publish on several ranks: rank 0 leads, the others follow, and some of them send a share of the buckets."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import torch

from hwrl.comm import Group, Store
from hwrl.errors import CommAbortedError, CommError, HwrlError, TransferFailedError, first_line, in_one_line
from hwrl.interfaces import Backend
from hwrl.weights.buckets import ChangedSums, TensorReader
from hwrl.weights.control import ControlChannel, Note
from hwrl.weights.layout import NamedTensor, WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.messages import DecisionKind, Limits, Proposal, Vote, VoteKind
from hwrl.weights.report import StageClock
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.source import Gatherers, WeightSource, gathered
from hwrl.weights.transport import SenderContext, SenderRound, Transport, TransportSender, aborted_when

_LOOK_S = 0.2
_HEAD_NBYTES = 256


class ShareReport(Vote):
    """How another sender's part of a round ended. "Torn" may be because of a receiver: another round may succeed."""

    name = "a sending rank's report"


class ShareKey(StrEnum):
    """The keys of the notes between rank 0 and the other senders. All but STOP end with the share's number."""

    REPORT = "share"
    """The kind of its end, and the reason."""
    CHANGED = "changed"
    """How many checksums of a share differ from the version before; empty if there is none."""
    STOP = "stop"
    """Rank 0 writes it to end the round for the others; its text does not matter."""


# -- all ranks ------------------------------------------------------------------------------------------------------


def exchange(group: Group, message: Any = None) -> Any:
    """Broadcast rank 0's ``message``, as JSON, and return it. Rank 0 does not wait for the others."""
    text = json.dumps(message).encode() if group.rank == 0 else b""
    head = _broadcast(group, (len(text).to_bytes(8, "big") + text)[:_HEAD_NBYTES], _HEAD_NBYTES)
    nbytes = int.from_bytes(head[:8], "big")
    if nbytes > _HEAD_NBYTES - 8:
        head += _broadcast(group, text[_HEAD_NBYTES - 8 :], nbytes + 8 - _HEAD_NBYTES)
    return json.loads(head[8 : 8 + nbytes])


def _broadcast(group: Group, raw: bytes, nbytes: int) -> bytes:
    words = torch.frombuffer(bytearray(raw.ljust(nbytes, b"\0")), dtype=torch.uint8).to(group.backend.device())
    pending = group.broadcast(words, src=0, async_op=True)
    if group.rank == 0:
        pending.wait()
        return raw
    pending.complete()  # not only queued on a stream: rank 0 may be dead
    return bytes(words.tolist())


def on_rank_0(
    group: Group | None, name: str, call: Callable[[], Any], *, follow: Callable[[int], Exception | None] | None = None
) -> Any:
    """Run ``call`` on rank 0, and return its JSON result on every rank.

    If it raises, the others raise CommAbortedError with the reason.

    ``name`` is what rank 0 does, for the error of the others. They call ``follow`` for each read that rank 0 begins
    meanwhile, with the number of its proposal. It raises if the ranks are out of step; it returns another error.
    """
    if group is None:
        return call()
    if group.rank:
        return _followed(group, name, follow)
    try:
        result = call()
    except BaseException as exc:
        with contextlib.suppress(CommError):  # exc is the cause
            why = f": {exc.why}" if isinstance(exc, HwrlError) and exc.why else ""
            exchange(group, {"failed": f"{in_one_line(exc)}{why}"})
        raise
    exchange(group, {"result": result})
    return result


def _followed(group: Group, name: str, follow: Callable[[int], Exception | None] | None) -> Any:
    failure: Exception | None = None
    while "read" in (message := exchange(group)):
        assert follow is not None, "rank 0 reads weights only in a publish"
        error = follow(message["read"])
        failure = failure or error
    if failure is not None:
        raise failure
    if "failed" in message:
        raise CommAbortedError(f"rank 0 could not {name}", why=message["failed"], fix="look at the log of rank 0")
    return message["result"]


# -- rank 0 ---------------------------------------------------------------------------------------------------------


def read_together(
    group: Group, source: WeightSource, *, number: int = 0, gatherers: Gatherers | None = None
) -> Iterator[NamedTensor]:
    """Yield rank 0's tensors of ``source``, while the other ranks follow. ``number`` is that of the proposal.

    Read it to its end, because the other ranks gather to the end.
    """
    exchange(group, {"read": number})
    yield from gathered(source, gatherers)


class Reports:
    """Rank 0's reader of the other senders' reports, one each in each round. ``ranks`` are the ranks of all senders."""

    def __init__(self, ranks: Sequence[int], limits: Limits) -> None:
        self._others = tuple(enumerate(ranks))[1:]
        self._limits = limits

    def wait_until_sent(self, sending: SenderRound) -> None:
        """Wait until every other sender has sent its share.

        Raises CommError if the transfer of one broke. Raises TransferFailedError, with the rank, if one failed or is
        silent for ``timeout_s``. After the first vote of a receiver the limit is shorter.
        """
        deadline = time.monotonic() + self._limits.timeout_s
        hurry = False
        for share, rank in self._others:
            report, left_s = None, math.inf
            while report is None and left_s > 0:  # look once at least: the one before may have come at the last moment
                left_s = deadline - time.monotonic()
                report = _note(sending, ShareKey.REPORT, share, timeout_s=min(_LOOK_S, left_s))
                if report is None and not hurry and sending.votes():
                    hurry, deadline = True, min(deadline, time.monotonic() + self._limits.votes_s)
            found = _read(report, rank)
            if found.kind is not VoteKind.WHOLE:
                raise CommError(f"the transfer of sending rank {rank} broke", why=found.detail, fix="look at its log")

    def changed(self, sending: SenderRound) -> list[int | None]:
        """Return how many checksums of each other share the committed version has changed; None if unknown."""
        deadline, changed = time.monotonic() + self._limits.votes_s, list[int | None]()
        for share, _ in self._others:
            found = _note(sending, ShareKey.CHANGED, share, timeout_s=deadline - time.monotonic()) or b""
            changed.append(int(found) if found.isdigit() else None)
        return changed

    def stop(self, sending: SenderRound) -> None:
        """Tell the other senders that the round is lost. Raises TransferFailedError if one failed or is silent."""
        if not self._others:
            return
        sending.channel.write(sending.proposal, Note.SHARE, name=ShareKey.STOP)
        deadline = time.monotonic() + self._limits.votes_s
        for share, rank in self._others:
            _read(_note(sending, ShareKey.REPORT, share, timeout_s=deadline - time.monotonic()), rank)

    def forget(self, sending: SenderRound) -> None:
        """Delete the round's reports."""
        if not self._others:
            return
        keys = [f"{kind}/{share}" for share, _ in self._others for kind in (ShareKey.REPORT, ShareKey.CHANGED)]
        for key in [*keys, ShareKey.STOP]:
            sending.channel.erase(sending.proposal, Note.SHARE, name=key)


def _note(sending: SenderRound, key: ShareKey, share: int, *, timeout_s: float) -> bytes | None:
    return sending.channel.read(sending.proposal, Note.SHARE, name=f"{key}/{share}", timeout_s=timeout_s)


def _read(report: bytes | None, rank: int) -> ShareReport:
    """Read a sender's report. Raises TransferFailedError if it says so, is malformed, or is missing."""
    if report is None:
        raise TransferFailedError(
            f"rank {rank} of the senders does not answer",
            why="it did not report about its share of the version, so it is dead or hangs",
            fix="look at that rank's log, then publish again",
        )
    found = ShareReport.read(report)
    if found.kind is VoteKind.FAILED:
        raise TransferFailedError(
            f"rank {rank} of the senders could not send its share",
            why=found.detail,
            fix="look at that rank's log, then publish again",
        )
    return found


# -- the ranks above 0 ----------------------------------------------------------------------------------------------


class Follower:
    """The part of a rank above 0 in the publishes of rank 0: it reads the weights, and may send a share of them.

    With one sender it needs no ``store``. Options are those of :class:`~hwrl.weights.WeightSender`.
    """

    def __init__(
        self,
        store: Store,
        group: Group,
        *,
        name: str,
        backend: Backend,
        senders: int,
        buckets: int,
        transports: Mapping[str, Transport],
    ) -> None:
        self._group, self._backend, self._buckets, self._transports = group, backend, buckets, transports
        self._ranks = sender_ranks(senders, group.size)
        if senders > 1:
            self._channel, self._watched = (ControlChannel(store, name=name, transports=transports) for _ in range(2))
        self._agreed: tuple[WeightLayout, Shares] | None = None
        self._end: TransportSender | None = None
        self._sums = ChangedSums()
        self._is_complete = False  # whether this rank has read to the end, so that it has sent and received all shards

    def follow(self, source: WeightSource, number: int) -> Exception | None:
        """Read ``source`` to its end with the other ranks, and send this rank's share of proposal ``number``, if any.

        A broken transfer is no error here, because rank 0 decides what follows. Any other error is raised, after the
        report to rank 0; it is returned instead if this rank has read to the end, and so can follow rank 0 further.
        Only an unknown proposal is raised without a report, because this rank has no share of it.
        """
        self._is_complete = False
        try:
            if len(self._ranks) == 1:
                for _ in self._tensors(source, None):
                    pass
            else:
                self._take_part(source, number)
        except Exception as exc:
            if not self._is_complete:
                raise  # at once, because the ranks are now out of step
            return exc
        return None

    def release(self) -> None:
        """Close the connections and free the device memory; the next round opens them again."""
        if self._end is not None:
            self._end.abort()
            self._end.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections and free all memory."""
        if self._end is not None:
            self._end.abort()
            self._end.close()
        self._end = self._agreed = None

    def _tensors(self, source: WeightSource, gatherers: Gatherers | None) -> Iterator[NamedTensor]:
        yield from gathered(source, gatherers)
        self._is_complete = True

    def _take_part(self, source: WeightSource, number: int) -> None:
        proposal = self._channel.proposal(number)
        if proposal is None:
            raise TransferFailedError(
                f"proposal {number} is unknown",
                why="rank 0 has forgotten it, or uses another store",
                fix="use one store on all ranks",
            )
        if self._group.rank in self._ranks:
            self._send(proposal, source, _Report(self._watched, proposal, self._ranks.index(self._group.rank)))
        else:
            for _ in self._tensors(source, self._agree(proposal)[1].gatherers):
                pass

    def _agree(self, proposal: Proposal) -> tuple[WeightLayout, Shares]:
        """Return the proposal's layout and shares, which are kept while the layout stays the same."""
        if self._agreed is None or self._agreed[0].hash != proposal.layout_hash:
            self.close()
            layout = self._channel.layout(proposal)
            self._agreed = layout, Shares(layout, self._ranks)
        return self._agreed

    def _send(self, proposal: Proposal, source: WeightSource, report: _Report) -> None:
        sending, reader = SenderRound(proposal, self._channel, Membership(self._channel)), None
        try:
            layout, shares = self._agree(proposal)
            mine = WeightSource.of_known_layout(lambda: self._tensors(source, shares.gatherers))
            reader = TensorReader(layout, mine, shares=shares, share=report.share)
            reader.begin()
            end = self._end = self._end or self._new_end(proposal, layout, report.share)

            def stop() -> None:  # a receiver may hang in the groups of this rank only, and rank 0 cannot abort those
                report.write(VoteKind.TORN, "rank 0 ended the round")
                end.abort()  # repeatedly, because it may be about to connect

            with torch.no_grad(), aborted_when(report.is_stopped, stop):
                sums = end.send(sending, reader, StageClock())
            report.write(VoteKind.WHOLE)
            self._report_changes(proposal, layout, sums, share=report.share)
        except BaseException as exc:
            lost = isinstance(exc, CommError) and reader is not None  # without a read the ranks are out of step
            report.write(VoteKind.TORN if lost else VoteKind.FAILED, first_line(exc) if lost else in_one_line(exc))
            if self._end is not None:
                self._end.abort()
            if not lost:
                raise
        finally:
            if reader is not None:
                reader.close()

    def _new_end(self, proposal: Proposal, layout: WeightLayout, share: int) -> TransportSender:
        context = SenderContext(
            store=self._channel.store,
            epoch=proposal.epoch,
            layout=layout,
            backend=self._backend,
            limits=proposal.limits,
            buckets=self._buckets,
            versions=1,
            senders=len(self._ranks),
            share=share,
        )
        return self._transports[proposal.transport].sender(context)

    def _report_changes(self, proposal: Proposal, layout: WeightLayout, sums: torch.Tensor, *, share: int) -> None:
        """Wait for the decision; then the device has sent, or rank 0 has ended the round and nobody asks."""
        decision, deadline = None, time.monotonic() + proposal.limits.decision_s
        while decision is None and self._channel.newest() <= proposal.number and time.monotonic() < deadline:
            decision = self._channel.decision(proposal, timeout_s=_LOOK_S)
        if decision is not None and decision.kind is DecisionKind.COMMITTED:
            changed = self._sums.count(layout, sums)
            text = "" if changed is None else str(changed)
            self._channel.write(proposal, Note.SHARE, text, name=f"{ShareKey.CHANGED}/{share}")


class _Report:
    """The report about ``share`` in one round.

    Only the first call of :meth:`write` writes it: rank 0 reads one.
    """

    def __init__(self, channel: ControlChannel, proposal: Proposal, share: int) -> None:
        self._channel, self._proposal, self.share = channel, proposal, share
        self._lock = threading.Lock()
        self._written = False

    def write(self, kind: VoteKind, why: str = "") -> None:
        """Write the report unless it was written before. If the store is lost, rank 0 misses the report."""
        with self._lock:
            if not self._written:
                self._written = True
                key, text = f"{ShareKey.REPORT}/{self.share}", ShareReport(kind, why).to_json()
                with contextlib.suppress(CommError):
                    self._channel.write(self._proposal, Note.SHARE, text, name=key)

    def is_stopped(self) -> bool:
        """Return whether rank 0 has ended the round."""
        stop = self._channel.read(self._proposal, Note.SHARE, name=ShareKey.STOP)
        return stop is not None or self._channel.decision(self._proposal) is not None
