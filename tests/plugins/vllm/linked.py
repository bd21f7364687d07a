"""A sender of a policy's weights and an engine on one weight link, in one process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch

from hwrl.comm import serve_store
from hwrl.interfaces import RolloutEngine
from hwrl.rollout import INCARNATION, EngineModels
from hwrl.weights import POLICY, POLICY_BASE, TransferReport, WeightSender, WeightSource
from tests.support.weight_link import beside

Weights = dict[str, torch.Tensor]


class Linked:
    """A link whose buckets are small: a version has many."""

    def __init__(
        self, engine: RolloutEngine, transport: str, *, base: bool = False, bucket_nbytes: int | None = 1 << 14
    ) -> None:
        self.engine, self.transport, self._bucket_nbytes = engine, transport, bucket_nbytes
        self.store, self._name = serve_store(), POLICY_BASE if base else POLICY
        names: Any = {"name": self._name, "replica": "r0"}
        self.link = EngineModels(engine, self.store, **names, timeout_s=600.0, once=base, poll_s=0.0)
        self.report: TransferReport | None = None
        self.sender = self.new_sender()

    def new_sender(self, *, timeout_s: float = 200.0) -> WeightSender:
        """Return a sender that takes the place of the one before."""
        return WeightSender(
            self.store,
            name=self._name,
            transport=self.transport,
            bucket_nbytes=self._bucket_nbytes,
            timeout_s=timeout_s,
        )

    def __enter__(self) -> Linked:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.link.close()
        self.sender.close()

    def update(self, version: int, weights: Any) -> bool:
        """Publish ``weights`` (a dict, or a WeightSource), and let the engine receive them."""
        source = weights if isinstance(weights, WeightSource) else WeightSource.of(weights.items())
        publishing = beside(lambda: self.sender.publish(version, source, {INCARNATION: 0}))
        self.wait_for_offer()
        try:
            return self.link.update()
        finally:
            self.report = publishing()

    def wait_for_offer(self) -> None:
        deadline = time.monotonic() + 300.0
        while not self.link.poll():
            assert time.monotonic() < deadline, "nothing is offered"
            time.sleep(0.002)


def interrupted(weights: Weights, interrupt: Any) -> WeightSource:
    """Return ``weights`` as a source that calls ``interrupt`` after the first half of its tensors."""

    def read() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights.items()):
            if number == len(weights) // 2:
                interrupt()
            yield item

    return WeightSource(lambda: iter(weights.items()), read)
