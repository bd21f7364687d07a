"""Transfers without a commit: nobody waits forever, and all waiting ends learn the reason."""

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from hwrl.comm import Store
from hwrl.errors import (
    CommAbortedError,
    CommError,
    ConfigError,
    LayoutMismatchError,
    TransferFailedError,
    UnsupportedError,
)
from hwrl.weights import WeightSender, WeightSource
from hwrl.weights.control import Note
from hwrl.weights.membership import Membership
from hwrl.weights.messages import Vote, VoteKind
from hwrl.weights.transport import ReceiverContext, SenderRound
from hwrl.weights.transports.device import DeviceReceiver
from hwrl.weights.transports.ipc import IpcReceiver
from tests.support.speed import slow
from tests.support.weight_link import (
    beside,
    channel_of,
    exchange,
    model_of,
    newest_proposal,
    received_by,
    receiver_of,
    sender_of,
    store,
)

__all__ = ["store"]  # the fixture

SOON_S = slow(200.0)  # far below every timeout of these tests, far above what a busy machine takes


class Collective:
    """Weights made with other ranks: each read must reach its end."""

    def __init__(self, *, fault: str = "") -> None:
        self.begun = self.ended = 0
        self._fault = fault

    def source(self) -> WeightSource:
        return WeightSource(self._metadata, self.read)

    def _metadata(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"t{number}", torch.empty(1024, device="meta")) for number in range(9))

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        self.begun += 1
        for number in range(9):
            wrong = self._fault == "wrong tensor" and number == 2
            yield f"t{number}", torch.zeros(3) if wrong else torch.full((1024,), float(number))
        self.ended += 1


class Failing(IpcReceiver):
    """Loses the sender's memory before anything came."""

    def receive(self, *args: Any) -> Any:
        raise CommError("the memory is gone", why="a test", fix="none")


class Held(DeviceReceiver):
    """Its library holds an operation whose peer has left, as Gloo may, until another thread aborts the group."""

    def __init__(self, context: ReceiverContext) -> None:
        super().__init__(context)
        self._aborted, self._thread = threading.Event(), threading.current_thread()

    def receive(self, *args: Any) -> torch.Tensor:
        self._thread = threading.current_thread()
        with contextlib.suppress(CommError):
            super().receive(*args)
        self._aborted.wait(3 * SOON_S)
        raise CommAbortedError("the group was aborted", why="a test", fix="none")

    def abort(self) -> None:
        super().abort()
        if threading.current_thread() is not self._thread:
            self._aborted.set()


def _interrupt(*_: Any, **__: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("transport", "fault"),
    [
        ("device", "wrong tensor"), ("device", "interrupt"), ("host", "wrong tensor"), ("host", "interrupt"),
        ("ipc", "wrong tensor"),
    ],
)  # fmt: skip
def test_a_collective_source_is_read_to_its_end_and_receivers_learn_why_nothing_comes(
    store: Store, transport: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = Collective(fault=fault)
    options = {"transport": transport, "bucket_nbytes": 4096, "timeout_s": 600.0}
    with sender_of(store, **options) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        if fault == "interrupt":
            monkeypatch.setattr("hwrl.weights.buckets.TensorReader.finish", _interrupt)
        begin = time.monotonic()
        with pytest.raises((LayoutMismatchError, KeyboardInterrupt)):
            sender.publish(1, weights.source())
        assert (weights.begun, weights.ended) == (1, 1)
        with pytest.raises((TransferFailedError, UnsupportedError)):  # ipc connects no process with itself
            waiting()
        assert time.monotonic() - begin < SOON_S


def test_a_receiver_held_in_a_transfer_learns_soon_that_the_sender_gave_up(store: Store) -> None:
    weights = Collective(fault="wrong tensor")
    with (
        sender_of(store, bucket_nbytes=4096, timeout_s=600.0) as sender,
        receiver_of(store, transports=received_by("device", Held)) as receiver,
    ):
        waiting, begin = beside(lambda: receiver.receive(timeout_s=600.0)), time.monotonic()
        with pytest.raises(LayoutMismatchError):
            sender.publish(1, weights.source())
        with pytest.raises(TransferFailedError, match="LayoutMismatchError"):
            waiting()
        assert time.monotonic() - begin < SOON_S


def test_attempts_that_fail_are_read_to_their_end_and_the_last_one_is_named_to_the_receivers(store: Store) -> None:
    weights = Collective()
    transports = received_by("ipc", Failing)
    with (
        sender_of(store, transport="ipc", bucket_nbytes=4096, timeout_s=600.0) as sender,
        receiver_of(store, transports=transports) as receiver,
    ):
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        begin = time.monotonic()
        with pytest.raises(TransferFailedError, match="3 attempts failed"):
            sender.publish(1, weights.source())
        assert (weights.begun, weights.ended) == (3, 3)
        with pytest.raises(TransferFailedError, match=r"gave up version 1[\s\S]*TransferFailedError: version 1 could"):
            waiting()
        assert time.monotonic() - begin < SOON_S
        assert receiver.poll() is None


def test_an_iterator_is_read_to_its_end_by_a_deposed_sender_too(store: Store) -> None:
    weights = Collective()
    with sender_of(store) as deposed, sender_of(store), pytest.raises(TransferFailedError, match="deposed"):
        deposed.publish(1, weights.read())
    assert (weights.begun, weights.ended) == (1, 1)


def test_a_source_that_no_receiver_wants_is_not_begun(store: Store) -> None:
    weights = Collective()
    with sender_of(store, timeout_s=0.2) as sender, receiver_of(store):
        assert sender.publish(1, weights.source()).excluded.keys() == {"r0"}
    assert weights.begun == 0


def test_a_healthy_receiver_waits_as_long_as_the_sender_waits_for_a_hung_one(store: Store) -> None:
    with sender_of(store, timeout_s=3.0) as sender, receiver_of(store, "healthy") as healthy:
        receiver_of(store, "hangs")
        waiting = beside(lambda: healthy.receive(timeout_s=slow(2.0)))  # less than the sender has for the hung one
        report = sender.publish(1, model_of(1))
        assert (report.receivers, set(report.excluded)) == (1, {"hangs"})
        assert waiting().version == 1


def test_an_interrupted_wait_for_receivers_ends_those_that_came(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with sender_of(store, timeout_s=600.0) as sender, receiver_of(store) as receiver:
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        monkeypatch.setattr("hwrl.weights.transport.SenderRound.wait_for_ready", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            sender.publish(1, model_of(1))
        with pytest.raises(TransferFailedError, match=r"the sender gave up version 1[\s\S]*KeyboardInterrupt"):
            waiting()
        monkeypatch.undo()
        exchange(sender, [receiver], 1)


class Instant(DeviceReceiver):
    """Has each version at once, whole."""

    def receive(self, receiving: Any, destination: Any, sums: Any, clock: Any) -> torch.Tensor:
        if receiving.proposal.version == 1:
            return super().receive(receiving, destination, sums, clock)
        return sums.values.clone()  # type: ignore[no-any-return]  # a tensor


@pytest.mark.parametrize("note", ["start", "decision"])
def test_a_dead_sender_is_waited_for_no_longer_than_its_own_limits(
    store: Store, note: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hwrl.weights.messages.SLACK_S", 0.1)
    transports = received_by("device", Instant)
    with sender_of(store) as sender, receiver_of(store, transports=transports) as receiver:
        exchange(sender, [receiver], 1)
        channel, newest = channel_of(store), newest_proposal(store)
        dead = replace(newest, number=newest.number + 1, version=2, timeout_s=0.2)
        if note == "decision":
            channel.write(dead, Note.START)
        channel.propose(dead)
        begin = time.monotonic()
        limit_s = {"start": 0.3, "decision": 0.5}[note]
        with pytest.raises(TransferFailedError, match=rf"the sender's '{note}' did not come within {limit_s} s"):
            receiver.receive(timeout_s=600.0)
        assert time.monotonic() - begin < SOON_S and receiver.version == 1


def test_a_new_sender_ends_the_transfer_of_the_one_before(store: Store) -> None:
    with sender_of(store, timeout_s=600.0) as first, receiver_of(store) as receiver:
        hangs = receiver_of(store, "hangs")
        publishing = beside(lambda: first.publish(9, model_of(9)))
        waiting = beside(lambda: receiver.receive(timeout_s=600.0))
        proposal = newest_proposal(store)
        assert not channel_of(store).missing(proposal, Note.READY, [proposal.to[0]], timeout_s=200.0)
        begin = time.monotonic()
        with sender_of(store, timeout_s=600.0) as second:
            with pytest.raises(TransferFailedError, match="deposed"):
                publishing()
            assert channel_of(store).decision(proposal) is None, "receivers wait for the new sender"
            hangs.close()
            assert dict(second.publish(3, model_of(3)).excluded) == {}
            assert waiting().version == 3
        assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize("transport", ["host", "device"])
def test_a_deposed_sender_that_wakes_late_hides_no_version_of_the_new_one(store: Store, transport: str) -> None:
    options = {"transport": transport, "timeout_s": 600.0}
    with sender_of(store, **options) as first, receiver_of(store) as receiver:
        exchange(first, [receiver], 1)
        channel, earlier = channel_of(store), newest_proposal(store)
        with sender_of(store, **options) as second:
            publishing = beside(lambda: second.publish(2, model_of(2)))
            channel.wait_for_newer(earlier.number, timeout_s=SOON_S)
            late = replace(earlier, number=channel.reserve_number(earlier.epoch), version=9)
            channel.propose(late)
            assert receiver.receive(timeout_s=SOON_S).version == 2
            assert not publishing().excluded
            exchange(second, [receiver], 3)


def test_a_sender_deposed_while_it_plans_its_layout_offers_nothing(store: Store) -> None:
    second: list[WeightSender] = []

    def metadata() -> Iterator[tuple[str, torch.Tensor]]:
        if not second:
            second.append(sender_of(store, transport="host"))
            second[0].publish(2, model_of(2))
        return iter(model_of(9))

    with sender_of(store, transport="host") as first, receiver_of(store) as receiver:
        with pytest.raises(TransferFailedError, match="deposed"):
            first.publish(9, WeightSource(metadata, lambda: iter(model_of(9))))
        assert receiver.receive(timeout_s=SOON_S).version == 2
        second[0].close()


def test_receivers_that_join_and_never_come_cannot_hold_a_version_up(store: Store) -> None:
    with sender_of(store, timeout_s=0.5) as sender, receiver_of(store, "healthy") as healthy:
        receiver_of(store, "ghost-0")
        waiting = beside(lambda: healthy.receive(timeout_s=600.0))
        publishing = beside(lambda: (sender.publish(1, model_of(1)), time.monotonic()))
        begin, seen, channel = time.monotonic(), 0, channel_of(store)
        while healthy.version is None and time.monotonic() - begin < slow(8.0):
            if channel.newest() != seen:  # for every round joins a receiver that never takes part
                seen = channel.newest()
                channel.join(f"ghost-{seen}")
        assert waiting().version == 1
        report, ended = publishing()
        assert report.receivers == 1 and ended - begin < slow(4 * 0.5) + SOON_S


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_timeout_that_cannot_work_is_refused(store: Store, timeout_s: float) -> None:
    with pytest.raises(ConfigError, match="timeout_s="):
        sender_of(store, timeout_s=timeout_s)


class _VotesMeanwhile(Membership):
    """While the sender looks who has left, a receiver writes its last note and votes."""

    def refresh(self) -> None:
        super().refresh()
        proposal = self._channel.proposal(self._channel.newest())
        assert proposal is not None
        (member,) = proposal.to
        self._channel.write(proposal, Note.TRANSPORT, member=member, name="read")
        self._channel.write(proposal, Note.VOTE, Vote(VoteKind.WHOLE).to_json(), member=member)


def test_a_receiver_that_has_read_all_and_voted_has_not_stopped_reading(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        channel = channel_of(store)
        sending = SenderRound(newest_proposal(store), channel, _VotesMeanwhile(channel))
        sending.wait_for_all("read", timeout_s=SOON_S)


class _Slow(Membership):
    """The link has so many members that one look at them takes longer than the sender waits."""

    looks = 0

    def refresh(self) -> None:
        super().refresh()
        self.looks += 1
        time.sleep(0.6)


def test_the_time_of_the_looks_counts_in_a_wait_for_receivers(store: Store) -> None:
    with sender_of(store) as sender, receiver_of(store) as receiver:
        exchange(sender, [receiver], 1)
        channel = channel_of(store)
        proposal = replace(newest_proposal(store), number=channel.reserve_number(1))
        membership = _Slow(channel)
        assert SenderRound(proposal, channel, membership).wait_for_ready(0.6) == list(proposal.to)
        assert membership.looks == 1
