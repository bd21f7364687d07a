"""Receivers that join and do not come delay no version for long, and are named; a dead one is withdrawn."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hwrl.comm import Store, connect_store, serve_store, store_address
from hwrl.weights import WeightReceiver, WeightSender, withdraw
from hwrl.weights.control import ControlChannel

TIMEOUT_S = 2.0


@pytest.fixture
def store() -> Iterator[Store]:
    server = serve_store()
    yield connect_store(store_address(server))


@pytest.fixture
def sender(store: Store) -> Iterator[WeightSender]:
    with WeightSender(store, transport="device", timeout_s=TIMEOUT_S) as sender:
        yield sender


def publish(sender: WeightSender, version: int, *receivers: WeightReceiver) -> tuple[float, int, dict[str, str]]:
    """Publish to ``receivers`` and to whoever else has joined; return seconds, receivers and the excluded."""
    threads = [threading.Thread(target=one.receive, kwargs={"timeout_s": 30.0}) for one in receivers]
    for thread in threads:
        thread.start()
    began_s = time.monotonic()
    report = sender.publish(version, [("w", torch.full((8,), float(version)))])
    seconds = time.monotonic() - began_s
    for thread in threads:
        thread.join(30.0)
    return seconds, report.receivers, dict(report.excluded)


def test_a_new_receiver_that_does_not_come_delays_versions_for_a_second_and_is_excluded_in_the_end(
    store: Store, sender: WeightSender, caplog: pytest.LogCaptureFixture
) -> None:
    with WeightReceiver(store, replica="old") as old:
        publish(sender, 1, old)
        with WeightReceiver(store, replica="new"):
            seconds, receivers, excluded = publish(sender, 2, old)
            assert 1.0 <= seconds < TIMEOUT_S and (receivers, excluded) == (1, {}), "it gets a later version"
            assert sender.joiners() == ("new",)
            with caplog.at_level(logging.WARNING, "hwrl.weights"):
                for version in range(3, 9):
                    _, _, excluded = publish(sender, version, old)
                    if excluded:
                        break
            assert excluded == {"new": f"it did not come to receive within {TIMEOUT_S:g} s"}
            assert "'new' is excluded" in caplog.text
            seconds, _, _ = publish(sender, 9, old)
            assert seconds < 0.5


def test_a_new_receiver_that_comes_late_gets_the_version_of_the_next_publish(
    store: Store, sender: WeightSender
) -> None:
    with WeightReceiver(store, replica="old") as old:
        publish(sender, 1, old)
        with WeightReceiver(store, replica="new") as new:
            assert publish(sender, 2, old)[1] == 1
            assert publish(sender, 2, new)[1] == 2 and new.version == 2


@pytest.fixture
def joining(store: Store) -> Iterator[Callable[[], None]]:
    """A process that joins as ``loop`` again and again and never comes; a call stops it."""
    ended = threading.Event()

    def join_again() -> None:
        channel = ControlChannel(store, name="policy", payloads={})
        while not ended.wait(0.3):
            channel.join("loop")

    thread = threading.Thread(target=join_again)
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join(10.0)

    yield stop
    stop()


def test_a_receiver_that_joins_again_and_again_and_never_comes_cannot_hold_a_version(
    store: Store, sender: WeightSender, joining: Callable[[], None]
) -> None:
    with WeightReceiver(store, replica="old") as old:
        seconds, receivers, _ = publish(sender, 1, old)
        assert receivers == 1 and seconds < 2 * TIMEOUT_S, "the first version has no receiver that is known to come"
        for version in (2, 3):
            seconds, receivers, _ = publish(sender, version, old)
            assert receivers == 1 and seconds < 2.5, "the others do not wait for it"
        joining()


@pytest.mark.parametrize("name", ["dead", "dead/1"])
def test_a_withdrawn_receiver_is_not_waited_for(store: Store, sender: WeightSender, name: str) -> None:
    with WeightReceiver(store, replica="deadly") as other:
        dead = WeightReceiver(store, replica=name)
        publish(sender, 1, dead, other)
        withdraw(store, names=["policy", "policy-base"], replica="dead")
        assert sender.receivers() == ("deadly",)
        seconds, receivers, excluded = publish(sender, 2, other)
        assert seconds < 1.0 and (receivers, excluded) == (1, {})
        dead.close()
