"""Receivers that join and do not come delay no version for long, and are named; a dead one is withdrawn."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from hwrl.comm import Store
from hwrl.weights import TransferReport, WeightReceiver, WeightSender, withdraw
from tests.support.speed import slow
from tests.support.weight_link import beside, channel_of, model_of, receiver_of, sender_of, store

__all__ = ["store"]  # the fixture

TIMEOUT_S, SOON_S, PATIENCE_S = 10.0, slow(5.0), slow(0.2)


@pytest.fixture
def sender(store: Store) -> Iterator[WeightSender]:
    with sender_of(store, timeout_s=TIMEOUT_S, patience_s=PATIENCE_S) as sender:
        yield sender


def publish(sender: WeightSender, version: int, *receivers: WeightReceiver) -> tuple[float, TransferReport]:
    """Publish to ``receivers`` and to whoever else has joined; return the seconds and the report."""
    waiting = [beside(functools.partial(one.receive, timeout_s=600.0)) for one in receivers]
    began_s = time.monotonic()
    report = sender.publish(version, model_of(version))
    seconds = time.monotonic() - began_s
    for wait in waiting:
        wait()
    return seconds, report


def test_a_new_receiver_that_does_not_come_delays_no_version_for_long(store: Store) -> None:
    with sender_of(store, timeout_s=TIMEOUT_S, patience_s=1.5) as sender, receiver_of(store, "old") as old:
        publish(sender, 1, old)
        with receiver_of(store, "new") as new:
            seconds, report = publish(sender, 2, old)
            assert 1.5 <= seconds < SOON_S and report.receivers == 1
            assert not report.excluded and sender.new_receivers() == ("new",)
            assert publish(sender, 2, new)[1].receivers == 2 and new.version == 2, "it gets a later version"
            assert old.poll() is None


def test_patience_stays_short_when_the_last_served_receiver_has_left(store: Store, sender: WeightSender) -> None:
    with receiver_of(store, "old") as old:
        publish(sender, 1, old)
    with receiver_of(store, "new"):
        seconds, report = publish(sender, 2)
        assert seconds < SOON_S and not report.excluded and report.left_out == ("new",)


def test_a_new_receiver_that_does_not_come_is_excluded_in_the_end(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    with sender_of(store, timeout_s=4.0, patience_s=PATIENCE_S) as sender, receiver_of(store, "old") as old:
        publish(sender, 1, old)
        with receiver_of(store, "new"), caplog.at_level(logging.WARNING, "hwrl.weights"):
            deadline_s = time.monotonic() + 600.0
            for version in itertools.count(2):
                excluded = dict(publish(sender, version, old)[1].excluded)
                if excluded or time.monotonic() > deadline_s:
                    break
            assert excluded == {"new": f"it was not ready to receive within {slow(4):g} s"}
            assert "'new' is excluded" in caplog.text and sender.new_receivers() == ()


@pytest.fixture
def joining(store: Store) -> Iterator[Callable[[], None]]:
    """A process that joins as ``loop`` again and again and never comes; a call stops it."""
    ended = threading.Event()

    def join_again() -> None:
        channel = channel_of(store)
        while not ended.wait(PATIENCE_S / 4):
            channel.join("loop")

    joined = beside(join_again)

    def stop() -> None:
        ended.set()
        joined()

    yield stop
    stop()


def test_a_receiver_that_joins_again_and_again_and_never_comes_cannot_hold_a_version(
    store: Store, sender: WeightSender, joining: Callable[[], None]
) -> None:
    with receiver_of(store, "old") as old:
        seconds, report = publish(sender, 1, old)
        assert report.receivers == 1 and seconds < slow(2 * TIMEOUT_S), (
            "of the first version no receiver is known to come"
        )
        for version in (2, 3):
            seconds, report = publish(sender, version, old)
            assert report.receivers == 1 and seconds < SOON_S, "the others do not wait for it"
        joining()


@pytest.mark.parametrize("name", ["dead", "dead/1"])
def test_a_withdrawn_receiver_is_not_waited_for(store: Store, sender: WeightSender, name: str) -> None:
    with receiver_of(store, "deadly") as other:
        dead = receiver_of(store, name)
        publish(sender, 1, dead, other)
        withdraw(store, names=["policy", "policy-base"], replica="dead")
        assert sender.receivers() == ("deadly",)
        seconds, report = publish(sender, 2, other)
        assert seconds < SOON_S and report.receivers == 1 and not report.excluded
        dead.close()


def test_one_of_a_replicas_receivers_can_be_withdrawn_alone(store: Store, sender: WeightSender) -> None:
    channel_of(store).join("dead", "dead/1", "dead/10")
    withdraw(store, names=["policy"], replica="dead/1")
    assert sender.receivers() == ("dead", "dead/10")
