"""A checkpoint engine for verl: it sends weights from the actors to the rollout workers, over a weight link of hwrl.

verl imports this module for ``checkpoint_engine.custom_backend_module=hwrl_verl.checkpoint_engine``.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import threading
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from hwrl.comm import connect_store, serve_store, store_address
from hwrl.errors import HwrlError, TransferFailedError
from hwrl.weights import IncomingVersion, NamedTensor, StreamReceiver, WeightSender

_LINK = "verl"
_PROPOSAL_S = 3600.0
"""Seconds that a worker waits for the first weights. verl ends the wait earlier if an actor dies."""


@CheckpointEngineRegistry.register("hwrl")
class HwrlCheckpointEngine(CheckpointEngine):  # type: ignore[misc] # verl's types are not followed
    """Sends weights from actor rank 0 to the rollout workers that verl chose for the update.

    The version is verl's step. ``sending`` are options of :class:`~hwrl.weights.WeightSender`; buckets have hwrl's best
    size, and ``bucket_size`` is not used. A worker's engine gets each tensor as it comes, and learns last whether the
    version was committed. With ``whole`` it gets no tensor before the commit, and the worker holds a whole model
    meanwhile.

    If a worker's engine fails, the other workers get the version. If a worker dies, the update fails for all, because
    verl's tensors can be read only once. Workers without the version join again in the next update.
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
        if self._receiver is not None and self._incoming is not None:
            missed = self._incoming.received is None or self._receiver[1].poll() is not None
            if missed:  # its update failed or a later one went to others, so it joins again
                self._incoming.close()
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
        """Send in this thread, and block it: making the tensors is collective, and no other call may come between."""
        if self._sender is None:
            collections.deque(weights, maxlen=0)
            return {}
        to = None if self._sender.keeps_versions else self._replicas
        report = self._sender.publish(global_steps or 0, weights, to=to, again=True)
        changed = {} if report.changed_share is None else {"weights/changed_share": report.changed_share}
        return {f"hwrl/{stage}_s": seconds for stage, seconds in report.seconds.items()} | changed

    def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[NamedTensor]:
        """Begin to receive at once, and return the tensors.

        verl's call may end with an error before it has taken all tensors. Then a thread reads the rest and drops it, so
        the other workers do not wait for an engine that failed.
        """
        assert self._receiver is not None, "verl calls init_process_group first"
        self._incoming = incoming = self._receiver[1].stream(timeout_s=_PROPOSAL_S)
        call = asyncio.current_task()
        assert call is not None, "verl's workers are asynchronous"
        call.add_done_callback(lambda _: threading.Thread(target=_read_the_rest, args=(incoming,), daemon=True).start())
        return self._tensors(incoming, global_steps or 0)

    async def _tensors(self, incoming: IncomingVersion, step: int) -> AsyncIterator[NamedTensor]:
        tensors = iter(await asyncio.to_thread(list, incoming)) if self._whole else incoming
        while (named := await asyncio.to_thread(next, tensors, None)) is not None:
            yield named
        if incoming.received is None or incoming.received.version != step:
            what, why = f"other weights came than those of step {step}", "the two ends began different updates"
            raise TransferFailedError(what, why=why, fix="update the weights again")


def _read_the_rest(incoming: IncomingVersion) -> None:
    with contextlib.suppress(HwrlError):  # verl raises the engine's error
        collections.deque(incoming, maxlen=0)
