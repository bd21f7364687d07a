"""A trainer and a replica on the links of a base and its adapters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hwrl.comm import Store
from hwrl.lora import add_adapter
from hwrl.rollout import (
    INCARNATION,
    AdapterUpdater,
    EmbeddedEngine,
    EngineModels,
    ModelLink,
    ReceivedModels,
    RetryingReceiver,
)
from hwrl.weights import POLICY, POLICY_BASE, PolicySender, SyncReport, WeightReceiver, WeightSource
from hwrl_cpu import INFO, CpuBackend
from tests.support.adapters import LORA, Weights, trained
from tests.support.tiny_model import END, requests_of, tiny_model
from tests.support.weight_link import beside, sender_of

BASE = 0xBA5E
REQUESTS = requests_of(6, temperature=0.0)


def readable(weights: Weights) -> WeightSource:
    return WeightSource(lambda: iter([(n, t.to("meta")) for n, t in weights.items()]), lambda: iter(weights.items()))


def nbytes_of(weights: Weights) -> int:
    return sum(tensor.nbytes for tensor in weights.values())


class Replica:
    """An engine with its updater. With ``in_place`` the engine itself receives its base."""

    def __init__(self, store: Store, *, base_poll_s: float = 0.0, in_place: bool = False) -> None:
        def receiver(name: str = POLICY, *, newest: bool = True) -> WeightReceiver:
            options: dict[str, Any] = {"backend": CpuBackend(INFO), "newest": newest}
            return WeightReceiver(store, name=name, replica="r0", **options)

        def connect() -> RetryingReceiver:
            return RetryingReceiver(receiver(), timeout_s=100.0, poll_s=0.0)

        model = add_adapter(tiny_model(99), LORA)
        self.engine = EmbeddedEngine(model, eos_ids=[END], max_running=6, max_length=24)

        def connect_base(*, newest: bool = True) -> ModelLink:
            if not in_place:
                base = receiver(POLICY_BASE, newest=newest)
                return ReceivedModels(self.engine, base, timeout_s=100.0, as_base=True, poll_s=base_poll_s)
            names: Any = {"name": POLICY_BASE, "replica": "r0"}
            return EngineModels(
                self.engine, store, **names, timeout_s=100.0, newest=newest, once=True, poll_s=base_poll_s
            )

        self.updater = AdapterUpdater(self.engine, connect=connect, connect_base=connect_base)

    def during(self, publish: Callable[[], SyncReport]) -> SyncReport:
        """Publish, and take all versions meanwhile and after."""
        published = threading.Event()

        def work() -> SyncReport:
            try:
                return publish()
            finally:
                published.set()

        result = beside(work)
        while not published.is_set():
            self.catch_up()
        self.catch_up()
        report: SyncReport = result()
        return report

    def catch_up(self) -> None:
        """Take all proposed versions."""
        while self.updater.poll():
            self.updater.update()


class Trainer:
    """A sender with weights of its own for each version."""

    def __init__(self, store: Store, transport: str, *, base: int = BASE, seed: int = 1) -> None:
        self.base, self._seed, self.transport = trained(seed)[0], seed, transport
        self.sender = PolicySender(
            lambda name: sender_of(store, name=name, transport=transport),
            base=base,
            metadata={INCARNATION: 0},
        )

    def adapter(self, version: int) -> Weights:
        return {name: tensor * (1 + version / 4) for name, tensor in trained(self._seed)[1].items()}

    def publish(self, version: int) -> SyncReport:
        return self.sender.send(version, model=readable(self.base), adapter=readable(self.adapter(version)))
