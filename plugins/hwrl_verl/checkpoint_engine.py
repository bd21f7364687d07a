"""verl's checkpoint engine ``hwrl``: weights from the actors to the rollout workers, over a weight link of hwrl.

verl imports this module for ``checkpoint_engine.custom_backend_module=hwrl_verl.checkpoint_engine``.
"""

from __future__ import annotations

import asyncio
import collections
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.errors import TransferFailedError
from hwrl.weights import IncomingVersion, NamedTensor, StreamReceiver, WeightSender

_LINK = "verl"
_PROPOSAL_S = 3600.0
"""How long a worker waits until the weights begin to come. verl ends the wait earlier if an actor dies."""


@CheckpointEngineRegistry.register("hwrl")
class HwrlCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl's types are not followed
    """Sends from actor rank 0 to the rollout workers of one update; verl's step is the version.

    ``sending`` are options of :class:`~hwrl.weights.WeightSender`; slabs have hwrl's best size, not ``bucket_size``. A
    worker's engine gets each tensor as it comes, and the verdict last. With ``whole`` it gets
    nothing before the verdict, and the worker holds a whole model for that time.

    A worker that fails, dies or is removed leaves the link; the others get the version. It joins again in a later
    update.
    """

    def __init__(self, bucket_size: int, is_master: bool = False, *, whole: bool = False, **sending: Any) -> None:
        self._whole, self._sender = whole, None
        if is_master:
            self._store = serve_store(ray.util.get_node_ip_address())
            self._sender = WeightSender(self._store, name=_LINK, **sending)
        self._replica, self._replicas = uuid.uuid4().hex, list[str]()
        self._receiver: tuple[str, StreamReceiver] | None = None
        self._incoming: IncomingVersion | None = None

    def prepare(self) -> dict[str, str]:
        if self._receiver is not None and self._incoming is not None and self._incoming.received is None:
            self._incoming.close()  # of an update that failed: join anew
            self._receiver[1].close()
            self._receiver = self._incoming = None
        return {"replica": self._replica} if self._sender is None else {"store": store_address(self._store)}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: Sequence[dict[str, str]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        replicas = [found["replica"] for found in metadata[actor_wg_world_size:]]
        actors = {"replicas": [replicas] * actor_wg_world_size}
        return actors, {"store": [metadata[0]["store"]] * rollout_world_size}

    def init_process_group(self, replicas: Sequence[str] = (), store: str = "") -> None:
        self._replicas = list(replicas)
        if store and (self._receiver is None or self._receiver[0] != store):
            receiver = StreamReceiver(connect_store(store), name=_LINK, replica=self._replica, newest=False)
            self._receiver = store, receiver

    def finalize(self) -> None:
        if self._receiver is not None:
            self._receiver[1].release()

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Send, in this thread: making the tensors is collective, and no other call may come between."""
        if self._sender is None:
            collections.deque(weights, maxlen=0)
            return {}
        to = None if self._sender.keeps_versions else self._replicas
        report = self._sender.publish(global_steps or 0, weights, to=to, again=True)
        return {f"hwrl/{stage}_s": seconds for stage, seconds in report.seconds.items()}

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Begin at once: the others need not wait for an engine that fails before it takes a tensor."""
        assert self._receiver is not None, "verl calls init_process_group first"
        self._incoming = self._receiver[1].stream(timeout_s=_PROPOSAL_S)
        return _Tensors(self, self._incoming, global_steps or 0, whole=self._whole)

    def give_up(self, incoming: IncomingVersion) -> None:
        """End the receive of ``incoming`` soon, if it is this worker's newest and not whole."""
        if self._incoming is incoming and incoming.received is None:
            incoming.cancel()


class _Tensors:
    """The tensors of a version. An engine that drops it before the end gives the version up."""

    def __init__(self, engine: HwrlCheckpointEngine, incoming: IncomingVersion, step: int, *, whole: bool) -> None:
        self._engine, self._incoming, self._step = engine, incoming, step
        self._all: Iterator[NamedTensor] | None = None if whole else incoming

    def __aiter__(self) -> _Tensors:
        return self

    async def __anext__(self) -> NamedTensor:
        if self._all is None:
            self._all = iter(await asyncio.to_thread(list, self._incoming))
        named = await asyncio.to_thread(next, self._all, None)
        if named is not None:
            return named
        received = self._incoming.received
        if received is None or received.version != self._step:
            what, why = f"other weights came than those of step {self._step}", "the two ends began different updates"
            raise TransferFailedError(what, why=why, fix="update the weights again")
        raise StopAsyncIteration

    def __del__(self) -> None:
        self._engine.give_up(self._incoming)
