"""verl's checkpoint engine ``hwrl``: weights from the actors to the rollout workers, over a weight link of hwrl.

verl imports this module for ``checkpoint_engine.custom_backend_module=hwrl_verl.checkpoint_engine``.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hwrl import get_backend
from hwrl.comm import connect_store, serve_store, store_address
from hwrl.errors import TransferFailedError
from hwrl.weights import Received, WeightReceiver, WeightSender

_Result = TypeVar("_Result")
Weights = Iterator[tuple[str, torch.Tensor]]


@CheckpointEngineRegistry.register("hwrl")
class HwrlCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl's types are not followed
    """Sends from actor rank 0 to every rollout worker; each has the version whole before its engine loads it.

    ``transport`` and ``timeout_s`` are those of :class:`~hwrl.weights.WeightSender`; slabs have hwrl's best size, not
    ``bucket_size``. A worker that fails leaves the link: the others get the version, and it joins again at the next
    transfer. Everything of hwrl runs in one thread, on the device of the thread that made the engine.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, transport: str = "device", timeout_s: float = 60.0
    ) -> None:
        self._transport, self._timeout_s, self._replica = transport, timeout_s, uuid.uuid4().hex
        backend = get_backend()
        device = backend.current_index()
        self._thread = ThreadPoolExecutor(1, "hwrl-weights", initializer=lambda: backend.set_device(device))
        self._served = serve_store(ray.util.get_node_ip_address()) if is_master else None
        self._place: tuple[str, str] | None = None
        self._end: WeightSender | WeightReceiver | None = None
        self._version = 0

    def prepare(self) -> dict[str, str]:
        return {"store": store_address(self._served)} if self._served else {"replica": self._replica}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, str]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        replicas = [found["replica"] for found in metadata[actor_wg_world_size:]]
        link = hashlib.sha256("".join(replicas).encode()).hexdigest()[:16]  # other replicas, another link
        store, others = metadata[0]["store"], actor_wg_world_size - 1
        actors = {"store": [store] * actor_wg_world_size, "link": [link, *[""] * others]}
        return actors, {"store": [store] * rollout_world_size, "link": [link] * rollout_world_size}

    def init_process_group(self, store: str, link: str) -> None:
        self._thread.submit(self._open, store, link).result()

    def finalize(self) -> None:
        if self._end is not None:
            self._thread.submit(self._end.release).result()

    async def send_weights(self, weights: Weights, global_steps: int | None = None) -> dict[str, float]:
        sender = self._end
        if not isinstance(sender, WeightSender):
            await self._do(lambda: collections.deque(weights, maxlen=0))  # making them is collective
            return {}
        self._version += 1
        metadata = {} if global_steps is None else {"global_steps": global_steps}
        report = await self._do(lambda: sender.publish(self._version, weights, metadata))
        return {f"hwrl/{stage}_s": seconds for stage, seconds in report.seconds.items()}

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Begin to receive at once, so that an engine that fails does not keep the other workers waiting."""
        receiver = self._end
        assert isinstance(receiver, WeightReceiver), "verl calls init_process_group first"
        return self._named(self._do(lambda: receiver.receive(timeout_s=self._timeout_s)), global_steps)

    async def _named(
        self, receiving: asyncio.Future[Received], global_steps: int | None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        received = await receiving
        steps = received.metadata.get("global_steps")
        if steps != global_steps:
            raise TransferFailedError(
                f"the weights of step {steps} came, not those of step {global_steps}",
                why="the two ends began different transfers",
                fix="update the weights again",
            )
        for named in received.items():
            yield named

    def _open(self, store: str, link: str) -> None:
        if (store, link) == self._place and self._end is not None:
            return
        self._close()
        self._place = (store, link)
        if not link:
            return  # an actor that only helps to make the weights whole
        if self._served is not None:
            self._end = WeightSender(self._served, name=link, transport=self._transport, timeout_s=self._timeout_s)
        else:
            self._end = WeightReceiver(connect_store(store), name=link, replica=self._replica)

    def _close(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            end.close()

    def _do(self, work: Callable[[], _Result]) -> asyncio.Future[_Result]:
        """Do ``work`` in the thread of the link. After an error the next transfer makes the link anew."""

        def do() -> _Result:
            try:
                return work()
            except BaseException:
                self._close()
                raise

        return asyncio.wrap_future(self._thread.submit(do))
