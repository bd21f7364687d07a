"""The sender's owner chooses: who receives, under which number; and both ends learn at once what does not come."""

import functools
import threading
import time
from typing import Any

import pytest

from hwrl.comm import Store
from hwrl.errors import CommAbortedError, CommTimeoutError, ConfigError, TransferFailedError
from hwrl.weights import withdraw
from hwrl.weights.control import Note
from hwrl.weights.report import StageClock
from hwrl.weights.transports import device
from hwrl.weights.transports.device import Lanes
from tests.support.speed import slow
from tests.support.weight_link import (
    beside,
    channel_of,
    exchange,
    model_of,
    newest_proposal,
    receiver_of,
    sender_of,
    store,
)

__all__ = ["store"]  # the fixture

SOON_S = slow(200.0)


def test_a_version_goes_to_the_named_receivers_only(store: Store) -> None:
    with sender_of(store, timeout_s=600.0) as sender, receiver_of(store, "a") as a, receiver_of(store, "b") as b:
        sender.wait_for_receivers(["a", "b"])
        begin = time.monotonic()
        waiting = beside(a.receive)
        report = sender.publish(1, model_of(1), to=["a", "gone"])
        assert (report.receivers, dict(report.excluded)) == (1, {"gone": "it has not joined"})
        assert waiting().version == 1 and b.poll() is None
        assert sender.publish(2, model_of(2), to=[]).receivers == 0
        waiting = beside(b.receive)
        assert sender.publish(2, model_of(2), to={"b"}).receivers == 1 and waiting().version == 2
        assert exchange(sender, [a], 2).receivers == 2, "the others of the same version, later"
        assert time.monotonic() - begin < SOON_S and sender.receivers() == ("a", "b")


def test_receivers_that_cannot_be_chosen_are_refused(store: Store) -> None:
    with sender_of(store) as sender, pytest.raises(ConfigError, match="use to="):
        sender.publish(1, model_of(1), to="r0")
    with (
        sender_of(store, transport="host") as sender,
        pytest.raises(ConfigError, match=r"cannot send to \['r0'\] only[\s\S]*each receiver fetches"),
    ):
        sender.publish(1, model_of(1), to=["r0"])
    with (
        sender_of(store) as sender,
        receiver_of(store),
        pytest.raises(CommTimeoutError, match=r"1 of 2 \(r0, r1\)[\s\S]*only \['r0'\] joined"),
    ):
        sender.wait_for_receivers(["r0", "r1"], timeout_s=0.05)


def test_a_withdrawn_receiver_is_not_waited_for(store: Store) -> None:
    with sender_of(store, timeout_s=600.0) as sender, receiver_of(store) as stays, receiver_of(store, "idle") as idle:
        begin = time.monotonic()
        waiting, publishing = beside(stays.receive), beside(lambda: sender.publish(1, model_of(1)))
        proposal = newest_proposal(store)
        assert not channel_of(store).missing(proposal, Note.READY, [proposal.to[0]], timeout_s=200.0)
        withdraw(store, names=["policy"], replica="idle")
        assert publishing().receivers == 1 and waiting().version == 1
        idle.join()
        assert exchange(sender, [idle], 1).receivers == 2
        assert time.monotonic() - begin < SOON_S


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_the_version_before_a_failed_one_is_sent_again_where_it_may_be_lost(
    store: Store, in_place: bool, begun: bool
) -> None:
    def broken() -> Any:
        yield from model_of(2)[:1]
        raise KeyError("no such layer")

    into = dict(model_of(0)) if in_place else None
    with sender_of(store, bucket_nbytes=512, buckets=1) as sender, receiver_of(store, into=into) as receiver:
        exchange(sender, [receiver], 1)
        waiting = beside(receiver.receive)
        with pytest.raises(KeyError if begun else TransferFailedError):
            sender.publish(2, broken() if begun else model_of(2), None if begun else {"cannot be sent": []})  # type: ignore[dict-item]  # refused
        with pytest.raises(TransferFailedError, match="gave up version 2"):
            waiting()
        if begun:
            exchange(sender, [receiver], 1)
        assert sender.publish(1, model_of(1)).receivers == 1, "it is not waited for"
        assert receiver.version == 1
        exchange(sender, [receiver], 2)


@pytest.mark.parametrize("transport", ["device", "host"])
def test_a_number_can_be_the_callers(store: Store, transport: str) -> None:
    with (
        sender_of(store, transport=transport) as sender,
        receiver_of(store, "a") as a,
        receiver_of(store, "b") as b,
    ):
        exchange(sender, [a, b], 5)
        for version, value in ((5, 6.0), (5, 7.0), (3, 8.0), (4, 9.0)):
            waiting = [beside(one.receive) for one in (a, b)]
            assert sender.publish(version, model_of(value), again=True).receivers == 2
            for wait in waiting:
                found = wait()
                assert (found.version, found["b"].item()) == (version, value)
        if transport == "device":
            assert sender.publish(4, model_of(9)).receivers == 2 and a.poll() is None, "it is not sent again unasked"
        with pytest.raises(TransferFailedError, match=r"cannot follow[\s\S]*again=True"):
            sender.publish(3, model_of(3))


@pytest.mark.parametrize("transport", ["device", "host"])
def test_a_publish_that_fails_before_it_proposes_is_given_up_at_once(store: Store, transport: str) -> None:
    def broken() -> Any:
        raise KeyError("no such layer")
        yield

    with sender_of(store, transport=transport, timeout_s=600.0) as sender, receiver_of(store) as receiver:
        begin = time.monotonic()
        waiting = beside(receiver.receive)
        with pytest.raises(KeyError):
            sender.publish(7, broken())
        with pytest.raises(TransferFailedError, match=r"gave up version 7[\s\S]*KeyError: 'no such layer'"):
            waiting()
        with pytest.raises(KeyError):
            sender.publish(8, broken())
        with pytest.raises(TransferFailedError, match="gave up version 8"):
            receiver.receive()  # it came later
        with pytest.raises(CommTimeoutError):
            receiver.receive(timeout_s=0.05)  # it was told once
        with receiver_of(store, "new") as new, pytest.raises(CommTimeoutError):
            new.receive(timeout_s=0.05)  # it joined later
        with pytest.raises(KeyError):
            sender.publish(9, broken())
        with sender_of(store) as other:
            with pytest.raises(CommTimeoutError):
                receiver.receive(timeout_s=0.05)  # of a sender that is gone
            exchange(other, [receiver], 1)
        assert time.monotonic() - begin < SOON_S


def test_receivers_that_were_proposed_nothing_learn_that_a_version_is_given_up(store: Store) -> None:
    def broken() -> Any:
        assert joined.wait(200.0)
        raise KeyError("no such layer")
        yield

    with sender_of(store, timeout_s=600.0) as sender, receiver_of(store, "a") as a:
        for version, to in ((2, None), (3, ["a"])):
            exchange(sender, [a], version - 1)
            joined = threading.Event()
            publishing = beside(functools.partial(sender.publish, version, broken(), to=to))
            waiting = beside(a.receive)
            while newest_proposal(store).version != version:
                time.sleep(0.001)
            with receiver_of(store, "late", newest=False) as late:
                late_waiting = beside(functools.partial(late.receive, timeout_s=600.0 if to is None else slow(0.5)))
                joined.set()
                with pytest.raises(KeyError):
                    publishing()
                with pytest.raises(TransferFailedError, match=f"gave up version {version}"):
                    waiting()
                with pytest.raises(CommTimeoutError):
                    a.receive(timeout_s=0.05)  # it was told once
                with pytest.raises(CommTimeoutError if to else TransferFailedError):
                    late_waiting()


def test_a_receive_is_cancelled_while_it_connects(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cancelling(Lanes):
        def __init__(self, *args: Any, rank: int, **options: Any) -> None:
            if rank == 1:
                a.cancel()
            super().__init__(*args, rank=rank, **options)

    with sender_of(store) as sender, receiver_of(store, "a") as a:
        with monkeypatch.context() as connecting:
            connecting.setattr(device, "Lanes", Cancelling)
            waiting = beside(a.receive)
            assert sender.publish(1, model_of(1)).receivers == 0
            with pytest.raises(CommAbortedError, match="the receive was cancelled"):
                waiting()
        waiting = beside(a.receive)  # joins again
        sender.wait_for_receivers(["a"])
        assert sender.publish(1, model_of(1)).receivers == 1 and waiting().version == 1


def test_a_receive_that_waits_to_connect_with_a_hung_peer_is_cancelled_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()

    class Hanging(Lanes):
        def __init__(self, *args: Any, rank: int, **options: Any) -> None:
            assert rank != 2 or goes_on.wait(600.0)
            super().__init__(*args, rank=rank, **options)

    monkeypatch.setattr(device, "Lanes", Hanging)
    with (
        sender_of(store, timeout_s=600.0) as sender,
        receiver_of(store, "a") as a,
        receiver_of(store, "b") as b,
    ):
        waiting, hanging = beside(a.receive), beside(b.receive)
        sender.wait_for_receivers(["a", "b"])
        publishing, deadline = beside(lambda: sender.publish(1, model_of(1))), time.monotonic() + SOON_S
        while not any(key.endswith("/in/1") for key in store.list_keys()) and time.monotonic() < deadline:
            time.sleep(0.01)
        begin = time.monotonic()
        a.cancel()
        with pytest.raises(CommAbortedError, match="the receive was cancelled"):
            waiting()
        assert time.monotonic() - begin < SOON_S
        goes_on.set()
        assert publishing().receivers == 1 and hanging().version == 1


def test_a_transfer_that_is_ended_before_its_first_byte_is_repeated(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans: list[StageClock] = []

    class Ended(StageClock):
        def span(self, backend: Any) -> Any:
            spans.append(self)
            if len(spans) == 1:
                sender._link.end.abort()  # type: ignore[union-attr]  # as a broken library does
            return super().span(backend)

    with sender_of(store) as sender, receiver_of(store) as receiver:
        monkeypatch.setattr("hwrl.weights.sender.StageClock", Ended)
        waiting = beside(receiver.receive)
        assert sender.publish(1, model_of(1)).receivers == 1 and waiting().version == 1
        assert len(spans) == 2


def test_a_waiting_receive_is_cancelled_from_another_thread(store: Store) -> None:
    with sender_of(store, timeout_s=600.0) as sender, receiver_of(store, "a") as a, receiver_of(store, "b") as b:
        begin = time.monotonic()
        waiting = beside(a.receive)
        a.cancel()
        with pytest.raises(CommAbortedError, match="the receive was cancelled"):
            waiting()
        assert exchange(sender, [a, b], 1).receivers == 2, "it is still a member"
        waiting, publishing = beside(a.receive), beside(lambda: sender.publish(2, model_of(2)))
        while (proposal := newest_proposal(store)).version != 2:
            time.sleep(0.001)
        assert not channel_of(store).missing(proposal, Note.READY, [proposal.to[0]], timeout_s=200.0)
        a.cancel()  # it waits for b, which comes later
        with pytest.raises(CommAbortedError):
            waiting()
        assert b.receive().version == 2 and publishing().receivers == 1, "it left, and was not waited for"
        waiting = beside(a.receive)  # joins again
        sender.wait_for_receivers(["a", "b"])
        assert sender.publish(2, model_of(2)).receivers == 2 and waiting().version == 2
        assert time.monotonic() - begin < SOON_S
