"""How often an engine's thread looks for new weights."""

from __future__ import annotations

import time

import pytest

from hwrl.comm import Store
from hwrl.errors import ReceiverExcludedError
from hwrl.rollout import RetryingReceiver
from hwrl.weights import WeightReceiver
from hwrl_cpu import INFO, CpuBackend
from tests.support.adapter_link import BASE, Replica, Trainer
from tests.support.weight_link import beside, channel_of, model_of, receiver_of, sender_of, store

__all__ = ["store"]


class CountingReceiver(WeightReceiver):
    """Counts its looks into the store."""

    looks = 0

    def poll(self) -> int | None:
        self.looks += 1
        return super().poll()


def test_polls_look_into_the_store_on_a_clock_and_at_once_after_a_transfer(store: Store) -> None:
    receiver = CountingReceiver(store, replica="r0", backend=CpuBackend(INFO))
    link = RetryingReceiver(receiver, timeout_s=100.0, poll_s=0.2)
    with sender_of(store, transport="host") as sender, receiver:
        assert not link.poll()
        sender.publish(1, model_of(1))
        began_s = time.monotonic()
        while not link.poll():
            assert time.monotonic() - began_s < 300
        assert receiver.looks == 2 and link.poll() and receiver.looks == 2
        received = link.receive()
        assert received is not None and received.version == 1
        assert not link.poll() and receiver.looks == 3


def test_a_base_that_came_since_the_last_look_is_loaded_before_its_adapter(store: Store) -> None:
    replica, trainer = Replica(store, base_poll_s=1e6), Trainer(store, "host")
    assert not replica.updater.poll()
    publishing = beside(lambda: trainer.publish(1))
    while not replica.updater.poll():
        time.sleep(0.01)
    replica.updater.update()
    assert replica.engine.base == BASE and replica.updater.totals()["base_loads"] == 1
    replica.catch_up()
    publishing()
    assert replica.engine.version == 1
    trainer.sender.close()


def test_a_receiver_to_which_nothing_new_is_offered_soon_sees_its_exclusion(store: Store) -> None:
    with receiver_of(store) as receiver:
        assert receiver.poll() is None
        channel_of(store).exclude(1, "it was silent")
        deadline_s = time.monotonic() + 100
        with pytest.raises(ReceiverExcludedError, match="it was silent"):
            while time.monotonic() < deadline_s:
                receiver.poll()
        receiver.join()
        assert receiver.poll() is None
