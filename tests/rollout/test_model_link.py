"""Whole models from a weight link straight into an engine's weights, or through room for two versions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hwrl.comm import Store, serve_store, store_address
from hwrl.rollout import INCARNATION, EmbeddedEngine, EngineModels, ModelUpdater, ReceivedModels, RetryingReceiver
from hwrl.weights import POLICY, TransportName, WeightReceiver, WeightSender
from hwrl_cpu import INFO, CpuBackend
from tests.support.tiny_model import END, requests_of, tiny_model
from tests.support.weight_link import beside, sender_of

TRANSPORTS: list[Any] = ["device", pytest.param("ipc", marks=pytest.mark.extended), "host"]
Weights = dict[str, torch.Tensor]


@pytest.fixture
def store() -> Iterator[Store]:
    yield serve_store()


def weights_of(seed: int) -> Weights:
    return {name: tensor.clone() for name, tensor in tiny_model(seed).state_dict().items()}


class Replica:
    """An engine with its updater."""

    def __init__(self, store: Any, *, keep_old: bool = False, poll_s: float = 0.0) -> None:
        self.engine = EmbeddedEngine(tiny_model(99), eos_ids=[END], max_running=6, max_length=24)
        if keep_old:
            receiver = WeightReceiver(store, replica="r0", backend=CpuBackend(INFO))
            link: Any = ReceivedModels(self.engine, RetryingReceiver(receiver, timeout_s=10.0, poll_s=poll_s))
        else:
            names = {"address": store_address(store), "name": POLICY, "replica": "r0"}
            link = EngineModels(self.engine, store, **names, timeout_s=10.0, poll_s=poll_s)
        self.updater = ModelUpdater(link)

    def update_during(self, publish: Callable[[], Any]) -> Any:
        """Publish, and update once."""
        publishing = beside(publish)
        self.wait_for_offer()
        self.updater.update()
        return publishing()

    def wait_for_offer(self) -> None:
        deadline = time.monotonic() + 20.0
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
            replica.engine.submit(requests_of(2))
            while replica.engine.pending():
                for done in replica.engine.step():
                    assert set(done.response.versions.tolist()) == {version}
    assert replica.updater.totals()["received_nbytes"] == 3 * report.nbytes
