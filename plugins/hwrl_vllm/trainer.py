"""The trainer's end of vLLM's weight transfer, for any trainer; its process needs no vLLM."""

from __future__ import annotations

import collections
import json
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch

from hwrl.comm import Store, clone_store, serve_store, store_address
from hwrl.errors import EngineError, TransferFailedError
from hwrl.interfaces import WeightOffer
from hwrl.rollout import EngineModels
from hwrl.weights import POLICY, NamedTensor, Taken, TransferReport, WeightSender, WeightSource

WORKERS = "vllm/workers"
"""The store's key of the number of workers that have joined."""


def answer_key(call: int, number: int) -> str:
    """Return the store's key of worker ``number``'s answer to ``call``; call 0 is the joining."""
    return f"vllm/answers/{call}/{number}"


class TransferClient(Protocol):
    """Calls vLLM's workers, all of them; as vLLM's ``VLLMWeightSyncClient``. Each method blocks until they are done."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join a trainer."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do one step of the update."""

    def finish_weight_update(self) -> None:
        """End the update."""


@dataclass(kw_only=True)
class TransferTrainerInit:
    """The settings of :class:`TransferTrainer`.

    ``rank`` is the trainer's rank; rank 0 sends. ``host`` is this machine's address for the workers. ``transport`` and
    ``timeout_s`` are those of :class:`~hwrl.weights.WeightSender`. With ``keep_old_version`` each worker has memory
    for its part of a second version during an update, and the old one serves until all workers have the new one.
    Without it each version is loaded in place.
    """

    backend: ClassVar[str] = "hwrl"
    rank: int = 0
    host: str = "127.0.0.1"
    transport: str = "device"
    keep_old_version: bool = True
    timeout_s: float = 60.0

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends."""
        return self.rank == 0


class TransferTrainer:
    """Sends the weights of ``source`` to the vLLM behind ``client``; vLLM's ``TrainerWeightTransferEngine``.

    ``source`` is a :class:`~hwrl.weights.WeightSource` or vLLM's. It is read once in each update, on every rank, to
    its end. Only rank 0 (``init_info.rank``) needs whole tensors and calls the client. Used from one thread.
    """

    def __init__(self, init_info: TransferTrainerInit, *, client: TransferClient, source: Any) -> None:
        self._init, self._client, self._source = init_info, client, source
        self.version = 0
        """The number of updates so far."""
        if not init_info.is_sender:
            return
        self._store = serve_store(init_info.host)
        address, beside = store_address(self._store), clone_store(self._store)  # a client blocks its other threads
        self._workers = _Workers(client, beside, address=address, keep_old_version=init_info.keep_old_version)
        engine: Any = self._workers  # the part of an engine that takes offers
        self._link = EngineModels(
            engine, beside, address=address, name=POLICY, replica="vllm", timeout_s=init_info.timeout_s
        )
        self._sender = WeightSender(self._store, transport=init_info.transport, timeout_s=init_info.timeout_s)

    @classmethod
    def trainer_init(cls, init_info: TransferTrainerInit, *, client: TransferClient, source: Any) -> TransferTrainer:
        """Return the trainer's end, joined by all workers. Called on every rank."""
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Send the source's weights, and return when every worker has loaded them. Called on every rank; blocks.

        Raises TransferFailedError or EngineError if a worker did not get them. The old version then serves, and the
        next call sends again.
        """
        self.version += 1
        source = _OnePass(self._source)
        try:
            if self._init.is_sender:
                self._update(source)
        finally:
            source.drain()  # the other ranks read it, too

    def shutdown(self) -> None:
        """Close the connections."""
        if self._init.is_sender:
            self._link.close()
            self._sender.close()

    def _update(self, source: _OnePass) -> None:
        self._client.start_weight_update()
        try:
            self._link.join()
            report = self._transfer(WeightSource(source.metadata, source.read))
            if report.receivers < self._workers.receivers:
                raise TransferFailedError(
                    f"version {self.version} is not in vLLM",
                    why=f"{self._workers.failure or dict(report.excluded) or 'no worker received it'}",
                    fix="send it again; vLLM's log has more",
                )
            if self._init.keep_old_version:
                self._workers.install()
        finally:
            self._client.finish_weight_update()

    def _transfer(self, source: WeightSource) -> TransferReport:
        """Send a version here while the workers receive it, in calls of another thread."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(self._receive, ended)
            try:
                report = self._sender.publish(self.version, source)
            finally:
                ended.set()
            receiving.result()
        return report

    def _receive(self, ended: threading.Event) -> None:
        while not self._link.look():
            if ended.wait(0.005):
                return
        self._link.load(incarnation=0)


class _Workers:
    """vLLM's workers as the receivers of one engine; they answer in the store."""

    version = -1
    failure = ""
    """Why the workers have not received the newest version."""

    def __init__(self, client: TransferClient, store: Store, *, address: str, keep_old_version: bool) -> None:
        self._client, self._store, self._calls = client, store, 0
        client.init_weight_transfer_engine({"store": address, "keep_old_version": keep_old_version})
        self.receivers = int(store.add(WORKERS, 0))
        joined = self._answers()
        _require_all([(one["rank"], one["of"]) for one in joined])
        if any(one["updating"] for one in joined):  # the trainer before has died in an update
            client.finish_weight_update()

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError if the weights belong to another model; nothing is overwritten."""
        self._call("the old version serves", forms={name: (str(t.dtype), list(t.shape)) for name, t in tensors.items()})

    def receive_weights(self, offer: WeightOffer) -> int | None:
        """Let the workers take ``offer``; return its proposal if all of them have."""
        taken = self._call("the old version is lost unless it is kept", offer=asdict(offer))
        self.failure = "; ".join(f"worker {number}: {one.why}" for number, one in enumerate(taken) if not one.proposal)
        return None if self.failure else min(taken).proposal

    def install(self) -> None:
        """Load the received version into the model of every worker."""
        self._call("its weights are of two versions, until a whole version is sent")

    def _call(self, consequence: str, **what: Any) -> list[Taken]:
        self._calls += 1
        self._client.update_weights({"call": self._calls, **what})
        taken = [Taken(**answer) for answer in self._answers()]
        faults = [f"worker {number}: {one.why}" for number, one in enumerate(taken) if one.fault]
        if faults:
            raise EngineError(f"vLLM failed in an update; {consequence}", why="; ".join(faults), fix="see vLLM's log")
        return taken

    def _answers(self) -> list[dict[str, Any]]:
        keys = [answer_key(self._calls, number) for number in range(self.receivers)]
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return answers


class _OnePass:
    """A source of weights for one update: its ranks read it together, so each reads it once."""

    def __init__(self, source: Any) -> None:
        self._source, self._is_read = source, False

    def metadata(self) -> Iterator[NamedTensor]:
        if isinstance(self._source, WeightSource):
            yield from self._source.metadata()
            return
        for meta in self._source.metadata():  # vLLM's
            yield meta.name, torch.empty(meta.shape, dtype=meta.dtype, device="meta")

    def read(self) -> Iterator[NamedTensor]:
        if self._is_read:
            raise TransferFailedError(
                "a part of the workers was lost in the transfer",
                why="each update reads the weights once",
                fix="send them again",
            )
        self._is_read = True
        yield from self._source

    def drain(self) -> None:
        if not self._is_read:
            collections.deque(self.read(), maxlen=0)


def _require_all(joined: list[tuple[int, int]]) -> None:
    """Raise EngineError unless every worker of each engine has joined; ``joined`` are their (rank, of how many)."""
    counts = collections.Counter(rank for rank, _ in joined)
    wanted = range(max((of for _, of in joined), default=1))
    if {counts[rank] for rank in wanted} != {max(counts.values(), default=1)}:
        raise EngineError(
            "not all of vLLM's workers have joined",
            why=f"of each {len(wanted)} workers these ranks have: {dict(counts)}",
            fix="can they reach TransferTrainerInit.host? vLLM's log has the reason",
        )
