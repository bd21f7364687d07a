"""Whole models from a weight link straight into an engine's weights, or through room for two versions."""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hwrl.comm import Store, serve_store
from hwrl.errors import EngineError
from hwrl.interfaces import RolloutEngine, WeightOffer
from hwrl.rollout import (
    INCARNATION,
    EmbeddedEngine,
    EngineModels,
    ReceivedModels,
    require_held,
)
from hwrl.saved_names import saved_weights
from hwrl.weights import (
    POLICY,
    CopyDestination,
    CopyRule,
    EngineReceiver,
    Taken,
    TransportName,
    WeightLayout,
    WeightReceiver,
    WeightSender,
    WeightSource,
)
from hwrl_cpu import INFO, CpuBackend
from tests.support.adapter_link import BASE, Trainer
from tests.support.adapter_link import Replica as AdapterReplica
from tests.support.faulty import CorruptingBackend
from tests.support.speed import slow
from tests.support.tiny_model import END, requests_of, tiny_model
from tests.support.weight_link import beside, channel_of, newest_proposal, sender_of

TRANSPORTS: list[TransportName] = ["device", "host"]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def store() -> Iterator[Store]:
    yield serve_store()


def weights_of(seed: int) -> Weights:
    return {name: tensor.clone() for name, tensor in tiny_model(seed).state_dict().items()}


class Replica:
    """An engine with its updater."""

    def __init__(self, store: Any, *, keep_old: bool = False, backend: Any = None, timeout_s: float = 100.0) -> None:
        backend = backend or CpuBackend(INFO)
        self.engine = EmbeddedEngine(tiny_model(99), eos_ids=[END], max_running=6, max_length=24, backend=backend)
        if keep_old:
            receiver = WeightReceiver(store, replica="r0", backend=CpuBackend(INFO))
            self.updater: Any = ReceivedModels(self.engine, receiver, timeout_s=100.0, poll_s=0.0)
        else:
            self.updater = EngineModels(self.engine, store, name=POLICY, replica="r0", timeout_s=timeout_s, poll_s=0.0)
        self.versions: list[int] = []

    def update_during(self, publish: Callable[[], Any]) -> Any:
        """Publish, and update once."""
        publishing = beside(publish)
        self.wait_for_offer()
        self.updater.update()
        return publishing()

    def update_until_published(self, publish: Callable[[], Any]) -> Any:
        """Publish, and update at each offer meanwhile, as a rollouter does; note the engine's version after each."""
        results: list[Any] = []
        publishing = threading.Thread(target=lambda: results.append(publish()))
        publishing.start()
        while publishing.is_alive():
            if self.updater.poll():
                self.updater.update()
                self.versions.append(self.engine.version)
            time.sleep(0.002)
        return results[0]

    def receive_before(self, work: Callable[[], Any]) -> None:
        """Do ``work`` in the next update, when the engine has the version."""
        receive: Any = self.engine.receive_weights

        def receive_and_work(offer: WeightOffer) -> int | None:
            del vars(self.engine)["receive_weights"]
            number: int | None = receive(offer)
            work()
            return number

        vars(self.engine)["receive_weights"] = receive_and_work

    def wait_for_offer(self) -> None:
        deadline = time.monotonic() + 200.0
        while not self.updater.poll():
            assert time.monotonic() < deadline
            time.sleep(0.002)

    def holds(self, weights: Weights) -> bool:
        own = self.engine.model.state_dict()
        return all(torch.equal(own[name], tensor) for name, tensor in weights.items())


def publishing(sender: WeightSender, version: int, *, incarnation: int = 0) -> Callable[[], Any]:
    return lambda: sender.publish(version, weights_of(version).items(), {INCARNATION: incarnation})


@pytest.mark.parametrize("keep_old", [False, True])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_each_version_is_in_the_engine_and_serves(store: Store, transport: TransportName, keep_old: bool) -> None:
    replica = Replica(store, keep_old=keep_old)
    with sender_of(store, transport=transport) as sender:
        for version in (1, 2, 3):
            report = replica.update_during(publishing(sender, version))
            assert report.excluded == {} and replica.engine.version == version
            assert replica.holds(weights_of(version))
            replica.engine.submit(requests_of(2, temperature=1.0))
            while replica.engine.pending():
                for done in replica.engine.step():
                    assert set(done.response.versions.tolist()) == {version}
    assert replica.updater.totals()["received_nbytes"] == 3 * report.nbytes


@pytest.mark.parametrize("keep_old", [False, True])
def test_a_transfer_that_its_sender_gives_up_is_not_served_and_the_next_is(store: Store, keep_old: bool) -> None:
    replica = Replica(store, keep_old=keep_old)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        *first, _ = weights_of(2).items()
        yield from first
        raise KeyError("the trainer fails")

    with sender_of(store, bucket_nbytes=1024) as sender:
        replica.update_during(publishing(sender, 1))
        source = WeightSource(lambda: iter(weights_of(2).items()), broken)
        with pytest.raises(KeyError):
            replica.update_during(lambda: sender.publish(2, source, {INCARNATION: 0}))
        assert replica.engine.version == (1 if keep_old else -1) and replica.holds(weights_of(1)) == keep_old
        replica.engine.submit(requests_of(1, temperature=1.0))
        if keep_old:
            assert replica.engine.step() is not None
        else:
            with pytest.raises(EngineError, match="the engine has no weights"):
                replica.engine.step()
        replica.engine.abort()
        replica.update_during(publishing(sender, 3))
        assert replica.engine.version == 3 and replica.holds(weights_of(3))


def test_a_layout_is_read_once_and_a_closed_engine_has_no_connections(store: Store) -> None:
    replica = Replica(store)
    with sender_of(store) as sender:
        replica.update_during(publishing(sender, 1))
        channel = channel_of(store)
        assert channel.store.delete_key(f"layout/{newest_proposal(store).layout_hash}")
        replica.update_during(publishing(sender, 2))
        assert replica.engine.version == 2
    opened = len(os.listdir("/proc/self/fd"))
    replica.engine.close()
    assert len(os.listdir("/proc/self/fd")) < opened


def test_a_stored_version_that_its_sender_has_replaced_meanwhile_serves(store: Store) -> None:
    replica = Replica(store)
    with sender_of(store, transport="host") as sender:
        publishing(sender, 1, incarnation=3)()
        replica.receive_before(publishing(sender, 2, incarnation=3))  # it forgets the first proposal
        replica.wait_for_offer()
        assert replica.updater.update() and replica.engine.version == 1
        assert replica.updater.incarnation == 3
        replica.wait_for_offer()
        assert replica.updater.update() and replica.engine.version == 2


def test_a_version_that_is_stored_too_slowly_is_offered_again(store: Store) -> None:
    replica, written = Replica(store, timeout_s=0.3), threading.Event()

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        *first, last = weights_of(1).items()
        yield from first
        assert written.wait(200.0)
        yield last

    source = WeightSource(lambda: iter(weights_of(1).items()), slow)
    with sender_of(store, transport="host", bucket_nbytes=1024) as sender:
        stored = beside(lambda: sender.publish(1, source, {INCARNATION: 0}))
        replica.wait_for_offer()
        assert not replica.updater.update() and replica.engine.version == -1
        written.set()
        stored()
        replica.wait_for_offer()
        assert replica.updater.update() and replica.engine.version == 1


def test_corrupt_bytes_are_not_served_and_the_replica_joins_again(store: Store) -> None:
    replica = Replica(store, backend=CorruptingBackend(at=0))
    with sender_of(store) as sender:
        report = replica.update_until_published(publishing(sender, 1))
        assert "corrupt" in report.excluded["r0"] and replica.versions[0] == -1
        if replica.engine.version == -1:  # else it joined again in time for another round of this version
            replica.update_during(publishing(sender, 1))
        assert replica.engine.version == 1 and replica.holds(weights_of(1))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_earlier_incarnations_version_overwrites_nothing(store: Store, transport: TransportName) -> None:
    replica = Replica(store)
    with sender_of(store, transport=transport) as sender:
        replica.update_during(publishing(sender, 1, incarnation=2))
    with sender_of(store, transport=transport, timeout_s=0.5) as late:
        replica.update_during(publishing(late, 2, incarnation=1))
        assert replica.engine.version == 1 and replica.holds(weights_of(1))
        assert replica.updater.incarnation == 2
    with sender_of(store, transport=transport) as sender:
        deadline = time.monotonic() + 200.0
        while not sender.receivers() and time.monotonic() < deadline:
            replica.updater.poll()  # the late sender has excluded the replica, which joins again
        replica.update_during(publishing(sender, 3, incarnation=2))
        assert replica.engine.version == 3


def test_another_models_weights_are_refused_before_anything_is_overwritten(store: Store) -> None:
    replica = Replica(store)
    with sender_of(store) as sender:
        replica.update_during(publishing(sender, 1))
    other = {**weights_of(2), "model.extra": torch.zeros(3)}
    with sender_of(store) as sender:
        result = beside(lambda: sender.publish(2, other.items(), {INCARNATION: 0}))
        replica.wait_for_offer()
        with pytest.raises(EngineError, match=r"unknown: \['model.extra'\]"):
            replica.updater.update()
        assert result().receivers == 0, "it is not waited for"
    assert replica.engine.version == 1 and replica.holds(weights_of(1))


def test_an_engine_with_an_adapter_receives_its_base(store: Any) -> None:
    replica = AdapterReplica(store, in_place=True)
    trainer = Trainer(store, "device")
    for version in (1, 2):
        report = replica.during(functools.partial(trainer.publish, version))
        assert (report.base is not None) == (version == 1)
        assert (replica.engine.version, replica.engine.base) == (version, BASE)
    own = saved_weights(replica.engine.model)[0]
    assert all(torch.equal(own[name], tensor) for name, tensor in trainer.base.items())
    assert replica.updater.totals()["base_loads"] == 1
    trainer.sender.close()


# -- an engine with two receivers -----------------------------------------------------------------------------------


class TwoWorkers(RolloutEngine):
    """Holds half of the rows of "w" in each of two workers, which receive in threads of their own."""

    receivers = 2

    def __init__(self) -> None:
        self.halves = [torch.zeros(8, 4), torch.zeros(8, 4)]
        self.failing: set[int] = set()
        self._held = [Taken()] * 2
        self._workers = [
            EngineReceiver(number, backend=CpuBackend(INFO), make_destination=functools.partial(self._place, number))
            for number in range(2)
        ]

    def _place(self, number: int, layout: WeightLayout) -> CopyDestination:
        if number in self.failing:
            raise ValueError("no room")
        rule = CopyRule("w", self.halves[number], (4, 1), 32 * number)
        return CopyDestination(layout, [rule], backend=CpuBackend(INFO))

    def check_weights(self, tensors: Any) -> None:
        pass

    def receive_weights(self, offer: WeightOffer) -> int | None:
        self.version = -1
        waiting = {
            number: beside(functools.partial(self._workers[number].take, offer))
            for number, member in enumerate(offer.members)
            if member is not None
        }
        for number, wait in waiting.items():
            self._held[number] = wait()
        taken = require_held(self._held, offer)
        if taken is None:
            return None
        self.version = taken.version
        return taken.proposal

    def submit(self, requests: Any) -> None: ...
    def step(self) -> list[Any]:
        return []

    def pending(self) -> int:
        return 0

    def capacity(self) -> int:
        return 0

    def abort(self) -> int:
        return 0

    def load_weights(self, weights: Any, *, version: int) -> None: ...


class Pair:
    """An engine with two workers, on a link."""

    def __init__(self, store: Any) -> None:
        self.engine = TwoWorkers()
        self.link = EngineModels(self.engine, store, name=POLICY, replica="r0", timeout_s=100.0, poll_s=0.0)

    def load_during(self, sender: WeightSender, version: int) -> Any:
        weights = {"w": torch.full((16, 4), float(version))}
        result = beside(lambda: sender.publish(version, weights.items(), {INCARNATION: 0}))
        deadline = time.monotonic() + 200.0
        while not self.link.poll():
            assert time.monotonic() < deadline
        try:
            self.link.update()
        finally:
            report = result()
        return report

    def holds(self, version: int) -> bool:
        return self.engine.version == version and all(half.eq(version).all() for half in self.engine.halves)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_receivers_of_an_engine_hold_a_version_together(store: Store, transport: TransportName) -> None:
    pair = Pair(store)
    with sender_of(store, transport=transport) as sender:
        for version in (1, 2):
            assert pair.load_during(sender, version).receivers == 2 and pair.holds(version)


def test_a_version_that_reaches_receivers_one_after_the_other_serves_when_all_hold_it(store: Store) -> None:
    pair = Pair(store)
    members = pair.link._members
    members.channel.leave(members.numbers[1])
    with sender_of(store) as sender:
        assert pair.load_during(sender, 1).receivers == 1
        assert pair.engine.version == -1 and pair.engine.halves[0].eq(1).all()
        members.numbers = (members.numbers[0], *members.channel.join("r0/1"))
        assert pair.load_during(sender, 1).receivers == 2 and pair.holds(1)


def test_a_receiver_that_fails_ends_the_others_in_the_senders_time_and_holds_nobody_up(store: Store) -> None:
    pair = Pair(store)
    pair.engine.failing = {1}
    with sender_of(store, timeout_s=3.0) as sender:
        began_s = time.monotonic()
        with pytest.raises(EngineError, match=r"version 1 was not received(.|\n)*receiver 1: ValueError: no room"):
            pair.load_during(sender, 1)
        assert time.monotonic() - began_s < slow(9) and pair.engine.version == -1
        pair.engine.failing = set()
        pair.link.request()
        pair.load_during(sender, 2)
        assert pair.holds(2)
