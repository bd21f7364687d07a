"""Several senders: a :class:`CoSender` on each further rank, and their :class:`Reports` to the first one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence

import torch

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.errors import CommError, TransferFailedError, first_line, in_one_line
from hwrl.interfaces import Backend
from hwrl.weights.control import ControlChannel, Limits, Proposal
from hwrl.weights.layout import WeightLayout
from hwrl.weights.membership import Membership
from hwrl.weights.notes import ShareKey, ShareKind, ShareReport
from hwrl.weights.report import StageClock
from hwrl.weights.shared_reads import FollowerRead
from hwrl.weights.shares import Shares, sender_ranks
from hwrl.weights.slabs import TensorReader
from hwrl.weights.source import WeightSource
from hwrl.weights.transport import SenderContext, SenderRound, Transport, TransportSender
from hwrl.weights.transports import TRANSPORTS

_LOOK_S = 0.2


def _report_key(share: int) -> str:
    return f"{ShareKey.REPORT}/{share}"


# -- the first rank -------------------------------------------------------------------------------------------------


class Reports:
    """What the co-senders write to the first rank in each round. ``ranks`` are those of all senders."""

    def __init__(self, ranks: Sequence[int], limits: Limits) -> None:
        self._co_senders = tuple(enumerate(ranks))[1:]
        self._limits = limits

    def wait_until_sent(self, sending: SenderRound) -> None:
        """Wait until every co-sender has sent its share.

        Raises CommError if one lost it. Raises TransferFailedError with the rank of a co-sender that failed, or that
        is silent: for ``timeout_s``, or for a shorter time after a receiver has given up.
        """
        deadline = time.monotonic() + self._limits.timeout_s
        hurry = False
        for share, rank in self._co_senders:
            report = None
            while report is None and time.monotonic() < deadline:
                report = sending.wait_for_co_sender(_report_key(share), timeout_s=_LOOK_S)
                if report is None and not hurry and sending.has_votes():
                    hurry, deadline = True, min(deadline, time.monotonic() + self._limits.votes_s)
            found = _read(report, rank)
            if found.kind is ShareKind.LOST:
                raise CommError(f"rank {rank} of the senders lost its share", why=found.why, fix="look at its log")

    def stop(self, sending: SenderRound) -> None:
        """End the co-senders' part of a lost round. Raises TransferFailedError if one is to blame, or is silent."""
        if not self._co_senders:
            return
        sending.tell_co_senders(ShareKey.STOP)
        deadline = time.monotonic() + self._limits.votes_s
        for share, rank in self._co_senders:
            left_s = max(0.0, deadline - time.monotonic())
            _read(sending.wait_for_co_sender(_report_key(share), timeout_s=left_s), rank)

    def forget(self, sending: SenderRound) -> None:
        """Delete the round's notes."""
        for share, _ in self._co_senders:
            sending.forget_co_sender_note(_report_key(share))
        if self._co_senders:
            sending.forget_co_sender_note(ShareKey.STOP)


def _read(report: bytes | None, rank: int) -> ShareReport:
    """Read a co-sender's report; raises TransferFailedError if it failed, or if the report is malformed or missing."""
    if report is None:
        raise TransferFailedError(
            f"rank {rank} of the senders does not answer",
            why="it did not report about its share of the version: it died or hangs",
            fix="look at its log; receivers continue with the version that they have",
        )
    found = ShareReport.read(report)
    if found.kind is ShareKind.FAILED:
        raise TransferFailedError(
            f"rank {rank} of the senders could not send its share",
            why=found.why,
            fix="look at its log; receivers continue with the version that they have",
        )
    return found


# -- the other ranks ------------------------------------------------------------------------------------------------


class CoSender:
    """The part of a rank above 0 in the link ``name`` with several senders: it sends its share of each version.

    The :class:`~hwrl.weights.WeightSender` on rank 0 coordinates: give this object to
    :meth:`~hwrl.weights.SharedReads.follow`. ``slabs`` slabs are under way at once. A rank without a share gives its
    shards to the senders. A context manager.
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

    def __enter__(self) -> CoSender:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def take_part(self, number: int, reading: FollowerRead) -> None:
        """Send this rank's share of proposal ``number``, and read to the end. Reports to rank 0 how it ended.

        A lost transfer raises nothing: rank 0 decides what follows. Any other error is raised, after the report.
        """
        proposal = self._channel.proposal(number)
        if proposal is None:
            raise TransferFailedError(
                f"proposal {number} is unknown", why="rank 0 has forgotten it", fix="use one store on all ranks"
            )
        layout, shares = self._agree(proposal, ranks=reading.ranks)
        source = WeightSource.of_known_layout(lambda: reading.tensors(shares.gatherers))
        if reading.rank not in shares.ranks:
            for _ in source:
                pass
            return
        share = shares.ranks.index(reading.rank)
        reader = TensorReader(layout, source, shares=shares, share=share)
        reader.begin()
        try:
            self._send(proposal, layout, reader, share)
        finally:
            reader.close()

    def release(self) -> None:
        """Close the connections and free the device memory; the next round opens both."""
        if self._end is not None:
            self._end.abort()
            self._end.release()
            self._backend.empty_cache()

    def close(self) -> None:
        """Close the connections, and free everything."""
        if self._end is not None:
            self._end.abort()
            self._end.close()
        self._end = self._agreed = None

    def _agree(self, proposal: Proposal, *, ranks: int) -> tuple[WeightLayout, Shares]:
        """Return the proposal's layout and shares; they are read once."""
        if self._agreed is None or self._agreed[0].hash != proposal.layout_hash:
            self.close()
            layout = self._channel.layout(proposal)
            self._agreed = layout, Shares(layout, sender_ranks(proposal.senders, ranks))
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
                directory=None,
                senders=proposal.senders,
                share=share,
            )
            self._end = self._transports[proposal.transport].sender(context)
        return self._end

    def _send(self, proposal: Proposal, layout: WeightLayout, reader: TensorReader, share: int) -> None:
        report = _Report(self._watched, proposal, _report_key(share))
        sending = SenderRound(proposal, self._channel, Membership(self._channel))
        try:
            end = self._end_for(proposal, layout, share)
            with torch.no_grad(), stopped_by_rank_0(report, end):
                end.send(sending, reader, StageClock())
            report.write(ShareKind.SENT)
        except CommError as exc:
            report.write(ShareKind.LOST, first_line(exc))
            self._abort()
        except BaseException as exc:
            report.write(ShareKind.FAILED, in_one_line(exc))
            self._abort()
            raise

    def _abort(self) -> None:
        if self._end is not None:
            self._end.abort()


class _Report:
    """A co-sender's report about one round. Only the first one is written; rank 0 waits for no other."""

    def __init__(self, channel: ControlChannel, proposal: Proposal, key: str) -> None:
        self._channel, self._proposal, self._key = channel, proposal, key
        self._lock = threading.Lock()
        self._written = False

    def write(self, kind: ShareKind, why: str = "") -> None:
        """Write the report, unless there is one. If the store is lost, rank 0 misses the report."""
        with self._lock:
            if not self._written:
                self._written = True
                with contextlib.suppress(CommError):
                    self._channel.put_transport_note(self._proposal, self._key, ShareReport(kind, why).to_json())

    def is_stopped(self) -> bool:
        """Return whether rank 0 has ended the round."""
        stop = self._channel.wait_for_transport_note(self._proposal, ShareKey.STOP, timeout_s=0.0)
        return stop is not None or self._channel.decision(self._proposal) is not None


@contextlib.contextmanager
def stopped_by_rank_0(report: _Report, end: TransportSender) -> Iterator[None]:
    """End the operations of ``end`` when rank 0 ends the round: a receiver may hang in this rank's groups only."""
    done = threading.Event()

    def watch() -> None:
        with contextlib.suppress(CommError):
            while not done.wait(_LOOK_S):
                if report.is_stopped():
                    report.write(ShareKind.LOST, "rank 0 ended the round")
                    end.abort()  # again and again: it may be about to connect

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
