"""Several senders: the :class:`CoSender` of each rank above 0, and rank 0's view of them, :class:`Reports`."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, TransferFailedError, first_line, in_one_line
from hwrl.interfaces import Backend
from hwrl.weights.control import ControlChannel
from hwrl.weights.layout import WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.messages import DecisionKind, Limits, Proposal
from hwrl.weights.notes import ShareKey, ShareKind, ShareReport
from hwrl.weights.report import StageClock
from hwrl.weights.shared_reads import FollowerRead
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.slabs import ChangedSums, TensorReader
from hwrl.weights.source import WeightSource
from hwrl.weights.transport import SenderContext, SenderRound, Transport, TransportSender
from hwrl.weights.transports import TRANSPORTS

_LOOK_S = 0.2


def _key(kind: ShareKey, share: int) -> str:
    return f"{kind}/{share}"


# -- rank 0 ---------------------------------------------------------------------------------------------------------


class Reports:
    """Rank 0's reader of the co-senders' reports, one each in each round. ``ranks`` are the ranks of all senders."""

    def __init__(self, ranks: Sequence[int], limits: Limits) -> None:
        self._co_senders = tuple(enumerate(ranks))[1:]
        self._limits = limits

    def wait_until_sent(self, sending: SenderRound) -> None:
        """Wait until every co-sender has sent its share.

        Raises CommError if a co-sender's transfer broke. Raises TransferFailedError, with the rank, if a co-sender
        failed or is silent for ``timeout_s``. After the first vote of a receiver the limit is shorter.
        """
        deadline = time.monotonic() + self._limits.timeout_s
        hurry = False
        for share, rank in self._co_senders:
            report, left_s = None, math.inf
            while report is None and left_s > 0:  # look once at least: the one before may have come at the last moment
                left_s = deadline - time.monotonic()
                report = sending.wait_for_co_sender(
                    _key(ShareKey.REPORT, share), timeout_s=max(0.0, min(_LOOK_S, left_s))
                )
                if report is None and not hurry and sending.has_votes():
                    hurry, deadline = True, min(deadline, time.monotonic() + self._limits.votes_s)
            found = _read(report, rank)
            if found.kind is ShareKind.LOST:
                raise CommError(f"the transfer of sending rank {rank} broke", why=found.why, fix="look at its log")

    def changed(self, sending: SenderRound) -> list[int | None]:
        """Return how many checksums of each co-sender's share the committed version has changed; None if unknown."""
        deadline, changed = time.monotonic() + self._limits.votes_s, list[int | None]()
        for share, _ in self._co_senders:
            left_s = max(0.0, deadline - time.monotonic())
            found = sending.wait_for_co_sender(_key(ShareKey.CHANGED, share), timeout_s=left_s) or b""
            changed.append(int(found) if found.isdigit() else None)
        return changed

    def stop(self, sending: SenderRound) -> None:
        """Tell the co-senders that the round is lost. Raises TransferFailedError if one failed or is silent."""
        if not self._co_senders:
            return
        sending.tell_co_senders(ShareKey.STOP)
        deadline = time.monotonic() + self._limits.votes_s
        for share, rank in self._co_senders:
            left_s = max(0.0, deadline - time.monotonic())
            _read(sending.wait_for_co_sender(_key(ShareKey.REPORT, share), timeout_s=left_s), rank)

    def forget(self, sending: SenderRound) -> None:
        """Delete the round's reports."""
        for share, _ in self._co_senders:
            for kind in (ShareKey.REPORT, ShareKey.CHANGED):
                sending.forget_co_sender_note(_key(kind, share))
        if self._co_senders:
            sending.forget_co_sender_note(ShareKey.STOP)


def _read(report: bytes | None, rank: int) -> ShareReport:
    """Read a co-sender's report. Raises TransferFailedError if it says so, is malformed, or is missing."""
    if report is None:
        raise TransferFailedError(
            f"rank {rank} of the senders does not answer",
            why="it did not report about its share of the version, so it is dead or hangs",
            fix="look at that rank's log, then publish again",
        )
    found = ShareReport.read(report)
    if found.kind is ShareKind.FAILED:
        raise TransferFailedError(
            f"rank {rank} of the senders could not send its share",
            why=found.why,
            fix="look at that rank's log, then publish again",
        )
    return found


# -- the ranks above 0 ----------------------------------------------------------------------------------------------


class CoSender:
    """The end of a rank above 0 on the link ``name`` with several senders. It sends its share of each version.

    The :class:`~hwrl.weights.WeightSender` on rank 0 coordinates. Pass this object to
    :meth:`~hwrl.weights.SharedReads.follow`, which calls it in each round. At most ``slabs`` slabs are under way at
    once. On a rank that is not a sender, it only takes part in the gathering: it passes tensor shards to the sending
    ranks. ``transports`` must have the sender's transport. A context manager.
    """

    def __init__(
        self,
        store: Store,
        *,
        name: str = "policy",
        backend: Backend | None = None,
        slabs: int = 4,
        transports: Mapping[str, Transport] = TRANSPORTS,
    ) -> None:
        self._backend, self._slabs = backend_or_default(backend), slabs
        self._transports = transports
        payloads = {key: transport.payload for key, transport in transports.items()}
        self._channel, self._watched = (ControlChannel(store, name=name, payloads=payloads) for _ in range(2))
        self._agreed: tuple[WeightLayout, Shares] | None = None
        self._end: TransportSender | None = None
        self._sums = ChangedSums()

    def __enter__(self) -> CoSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take_part(self, number: int, reading: FollowerRead) -> None:
        """Send this rank's share of proposal ``number`` and read the weights to their end; report the result to rank 0.

        A broken transfer raises nothing here, because rank 0 decides what follows. Any other error is raised after the
        report. Only an unknown proposal is raised without one, because this rank has no share of it.
        """
        proposal = self._channel.proposal(number)
        if proposal is None:
            raise TransferFailedError(
                f"proposal {number} is unknown",
                why="rank 0 has forgotten it, or uses another store",
                fix="use one store on all ranks",
            )
        ranks = sender_ranks(proposal.senders, reading.ranks)
        report = None
        if reading.rank in ranks:
            report = _Report(self._watched, proposal, ranks.index(reading.rank))
        with _failure_in(report):
            layout, shares = self._agree(proposal, ranks)
        source = WeightSource.of_known_layout(lambda: reading.tensors(shares.gatherers))
        if report is None:
            for _ in source:
                pass
            return
        reader = TensorReader(layout, source, shares=shares, share=report.share)
        reader.begin()
        try:
            self._send(proposal, layout, reader, report)
        finally:
            reader.close()

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

    def _agree(self, proposal: Proposal, ranks: Sequence[int]) -> tuple[WeightLayout, Shares]:
        """Return the proposal's layout and shares, which are kept while the layout stays the same."""
        if self._agreed is None or self._agreed[0].hash != proposal.layout_hash:
            self.close()
            layout = self._channel.layout(proposal)
            self._agreed = layout, Shares(layout, ranks)
        return self._agreed

    def _end_for(self, proposal: Proposal, layout: WeightLayout, share: int) -> TransportSender:
        if self._end is None:
            context = SenderContext(
                store=self._channel.store,
                epoch=proposal.epoch,
                layout=layout,
                backend=self._backend,
                limits=Limits(proposal.timeout_s),
                slabs=self._slabs,
                versions=1,
                senders=proposal.senders,
                share=share,
            )
            self._end = self._transports[proposal.transport].sender(context)
        return self._end

    def _send(self, proposal: Proposal, layout: WeightLayout, reader: TensorReader, report: _Report) -> None:
        sending = SenderRound(proposal, self._channel, Membership(self._channel))
        try:
            end = self._end_for(proposal, layout, report.share)
            with torch.no_grad(), stopped_by_rank_0(report, end):
                sums = end.send(sending, reader, StageClock())
            report.write(ShareKind.SENT)
            self._report_changes(proposal, layout, sums, share=report.share)
        except CommError as exc:
            report.write(ShareKind.LOST, first_line(exc))
            self._abort()
        except BaseException as exc:
            report.write(ShareKind.FAILED, in_one_line(exc))
            self._abort()
            raise

    def _report_changes(self, proposal: Proposal, layout: WeightLayout, sums: torch.Tensor, *, share: int) -> None:
        """Wait for the decision; then the device has sent, or rank 0 has ended the round and nobody asks."""
        decision, deadline = None, time.monotonic() + Limits(proposal.timeout_s).decision_s
        while decision is None and self._channel.newest() <= proposal.number and time.monotonic() < deadline:
            decision = self._channel.wait_for_decision(proposal, timeout_s=_LOOK_S)
        if decision is not None and decision.kind is DecisionKind.COMMITTED:
            changed = self._sums.count(layout, sums)
            text = "" if changed is None else str(changed)
            self._channel.put_transport_note(proposal, _key(ShareKey.CHANGED, share), text)

    def _abort(self) -> None:
        if self._end is not None:
            self._end.abort()


class _Report:
    """The report of the co-sender of ``share`` about one round.

    Only the first call of :meth:`write` writes it: rank 0 reads one.
    """

    def __init__(self, channel: ControlChannel, proposal: Proposal, share: int) -> None:
        self._channel, self._proposal, self.share = channel, proposal, share
        self._lock = threading.Lock()
        self._written = False

    def write(self, kind: ShareKind, why: str = "") -> None:
        """Write the report unless it was written before. If the store is lost, rank 0 misses the report."""
        with self._lock:
            if not self._written:
                self._written = True
                with contextlib.suppress(CommError):
                    self._channel.put_transport_note(
                        self._proposal, _key(ShareKey.REPORT, self.share), ShareReport(kind, why).to_json()
                    )

    def is_stopped(self) -> bool:
        """Return whether rank 0 has ended the round."""
        stop = self._channel.wait_for_transport_note(self._proposal, ShareKey.STOP, timeout_s=0.0)
        return stop is not None or self._channel.decision(self._proposal) is not None


@contextlib.contextmanager
def _failure_in(report: _Report | None) -> Iterator[None]:
    """Report an error to rank 0, which otherwise waits for this rank; then raise it."""
    try:
        yield
    except BaseException as exc:
        if report is not None:
            report.write(ShareKind.FAILED, in_one_line(exc))
        raise


@contextlib.contextmanager
def stopped_by_rank_0(report: _Report, end: TransportSender) -> Iterator[None]:
    """End the operations of ``end`` when rank 0 ends the round.

    A receiver may hang in the groups of this rank only, and rank 0 cannot abort those.
    """
    done = threading.Event()

    def watch() -> None:
        with contextlib.suppress(CommError):
            while not done.wait(_LOOK_S):
                if report.is_stopped():
                    report.write(ShareKind.LOST, "rank 0 ended the round")
                    end.abort()  # repeatedly, because it may be about to connect

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
