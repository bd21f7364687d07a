"""Base and adapter on their links, to a real engine: the plan follows from the engine's weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import Store
from hwrl.weights import PolicySender
from hwrl_cpu import INFO, CpuBackend
from tests.support.adapter_link import BASE, REQUESTS, Replica, Trainer, nbytes_of, readable
from tests.support.adapters import expected, reference, tokens_of
from tests.support.weight_link import beside, sender_of, store

__all__ = ["store"]
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it

OTHER_BASE = 0x07E4


def bring_base(replica: Replica, trainer: Trainer, version: int) -> None:
    """Give a replica its requested base: from the host's store, or with ``version`` sent once more."""
    if trainer.transport == "host":
        replica.catch_up()
        return
    assert trainer.sender.new_receivers() == ("r0",)
    assert replica.during(lambda: trainer.publish(version)).plan.what == "base + adapter"


@pytest.fixture(params=["device", "host"])
def transport(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def trainer(store: Store, transport: str) -> Iterator[Trainer]:
    trainer = Trainer(store, transport)
    yield trainer
    trainer.sender.close()


@pytest.fixture
def assert_serves(tmp_path: Path) -> Callable[..., None]:
    """Check a replica's version, and its tokens against PEFT's model of that version's weights."""

    def check(replica: Replica, trainer: Trainer, version: int) -> None:
        assert replica.engine.version == version
        model = reference(trainer.base, trainer.adapter(version), tmp_path)
        assert tokens_of(replica.engine, REQUESTS) == [expected(model, request) for request in REQUESTS]

    return check


def test_the_base_travels_once_and_then_the_adapter_alone(
    store: Store, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    replica = Replica(store)
    first = replica.during(lambda: trainer.publish(1))
    assert first.plan.what == "base + adapter"
    assert first.base is not None and first.base.nbytes == nbytes_of(trainer.base)
    assert_serves(replica, trainer, 1)
    for version in (2, 3):
        report = replica.during(functools.partial(trainer.publish, version))
        assert report.plan.what == "adapter"
        assert (report.base, report.policy.nbytes) == (None, nbytes_of(trainer.adapter(1)))
        assert_serves(replica, trainer, version)
    everything = nbytes_of(trainer.base) + 3 * nbytes_of(trainer.adapter(1))
    assert replica.updater.totals() == {"received_nbytes": everything, "base_loads": 1}


def test_a_base_that_was_slept_away_travels_with_the_next_version(
    store: Store, transport: str, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    replica = Replica(store)
    replica.during(lambda: trainer.publish(1))
    replica.engine.sleep(level=2)
    replica.updater.release()
    assert not replica.updater.poll(), "what is there already is no reason to wake up"
    assert not trainer.sender.new_receivers(), "a sleeper has time until the next version"
    replica.engine.wake()
    report = replica.during(lambda: trainer.publish(2))
    if transport == "host":
        assert report.plan.what == "adapter", "the base is in the store"
    else:
        assert (report.plan.what, report.plan.why) == ("base + adapter", "no base at r0")
    assert_serves(replica, trainer, 2)
    assert replica.updater.totals()["base_loads"] == 2


def test_a_replica_that_restarts_while_an_adapter_is_sent_asks_for_its_base(
    store: Store, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    Replica(store).during(lambda: trainer.publish(1))  # it is not heard of again
    base, adapter = readable(trainer.base), trainer.adapter(2)  # made here: so is the replica, of the same generator
    published = beside(lambda: trainer.sender.send(2, model=base, adapter=readable(adapter)))
    again = Replica(store)
    while again.updater.totals()["received_nbytes"] < nbytes_of(adapter):
        again.catch_up()
    assert published().plan.what == "adapter"
    bring_base(again, trainer, 2)
    assert_serves(again, trainer, 2)


def test_a_sleeper_keeps_the_base_at_level_1(
    store: Store, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    replica = Replica(store)
    replica.during(lambda: trainer.publish(1))
    replica.engine.sleep(level=1)
    replica.updater.release()
    replica.engine.wake()
    assert replica.during(lambda: trainer.publish(2)).plan.what == "adapter"
    assert_serves(replica, trainer, 2)


def test_a_restarted_replica_gets_the_base_again(
    store: Store, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    Replica(store).during(lambda: trainer.publish(1))
    replica = Replica(store)
    bring_base(replica, trainer, 1)
    assert_serves(replica, trainer, 1)


def test_an_adapter_that_comes_when_its_base_is_just_lost_waits_for_it(
    store: Store, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    replica = Replica(store)
    replica.during(lambda: trainer.publish(1))
    sent = beside(lambda: trainer.publish(2))
    while not replica.updater.poll():
        pass
    replica.engine.sleep(level=2)  # behind the updater's back, and after the decision
    replica.engine.wake()
    assert not replica.updater.update() and replica.engine.version == -1
    assert sent().plan.what == "adapter"
    replica.updater.poll()
    bring_base(replica, trainer, 2)
    assert_serves(replica, trainer, 2)


def test_an_adapter_of_another_base_is_not_served_before_that_base_has_come(
    store: Store, transport: str, trainer: Trainer, assert_serves: Callable[..., None]
) -> None:
    replica = Replica(store)
    replica.during(lambda: trainer.publish(5))
    other = Trainer(store, transport, base=OTHER_BASE, seed=2)
    sent = beside(lambda: other.publish(1))
    while not replica.updater.poll():
        pass
    if transport != "host":
        assert not replica.updater.update()
        assert sent().plan.what == "adapter"
        assert_serves(replica, trainer, 5)
        replica.updater.poll()
        bring_base(replica, other, 1)
    else:
        replica.catch_up()
        sent()
    assert replica.engine.base == OTHER_BASE
    assert_serves(replica, other, 1)
    other.sender.close()


def test_nothing_is_left_of_a_base_that_was_sent(
    store: Store, trainer: Trainer, caplog: pytest.LogCaptureFixture
) -> None:
    replica, keys = Replica(store), []
    for version in range(10):
        replica.during(functools.partial(trainer.publish, version))
        keys.append(store.num_keys())
        replica.engine.sleep(level=2)
        replica.updater.release()
        replica.engine.wake()
        replica.updater.request()
    assert replica.updater.totals()["base_loads"] == 10
    assert keys[2:] == [keys[1]] * 8
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_base_in_the_hosts_store_takes_no_device_memory(store: Store) -> None:
    base = {f"layer {number}": torch.full((1 << 18,), float(number)) for number in range(8)}
    adapter = {"lora": torch.ones(8)}
    sender = PolicySender(lambda name: sender_of(store, name=name, transport="host"), base=BASE)
    before = CpuBackend(INFO).memory_info().allocated_nbytes
    sender.send(1, model=readable(base), adapter=readable(adapter))
    assert CpuBackend(INFO).memory_info().allocated_nbytes - before < 1 << 20, "1 MiB of the 8 that were packed"
    sender.close()
