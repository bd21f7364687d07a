"""The trainer's end of vLLM's weight transfer, for any trainer; its process needs no vLLM."""

from __future__ import annotations

import collections
import json
import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Protocol

import torch

from hwrl.comm import Store, await_keys, clone_store, serve_store, store_address
from hwrl.errors import EngineError, TransferFailedError
from hwrl.interfaces import WeightOffer
from hwrl.rollout import EngineModels
from hwrl.weights import POLICY, NamedTensor, Taken, WeightSender, WeightSource

_log = logging.getLogger("vllm.hwrl")
WORKERS = "vllm/workers"
"""The store's key of the number of workers that have joined."""

_ANSWER_S = 10.0
"""How long after a call its answers may come, on a busy machine."""


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

    ``rank`` is the trainer's rank; rank 0 sends. ``host`` is this machine's address for the workers. ``transport``,
    ``slab_nbytes`` and ``timeout_s`` are those of :class:`~hwrl.weights.WeightSender`. With ``keep_old_version`` each
    worker has memory for its part of a second version during an update, and the old one serves until all workers have
    the new one. Without it each version is loaded in place.
    """

    backend: ClassVar[str] = "hwrl"
    rank: int = 0
    host: str = "127.0.0.1"
    transport: str = "device"
    keep_old_version: bool = True
    timeout_s: float = 60.0
    slab_nbytes: int | None = None

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
        self._beside = clone_store(self._store)  # for the thread of calls: a client blocks its other threads
        address = store_address(self._store)
        self._workers = _Workers(client, self._beside, address=address, keeps_old=init_info.keep_old_version)
        self._link = self._join()
        self._is_unsure = False
        """True while we do not know whether an update is under way."""
        self._sender = WeightSender(
            self._store,
            transport=init_info.transport,
            slab_nbytes=init_info.slab_nbytes,
            timeout_s=init_info.timeout_s,
        )

    @classmethod
    def trainer_init(cls, init_info: TransferTrainerInit, *, client: TransferClient, source: Any) -> TransferTrainer:
        """Return the trainer's end, joined by all workers. Called on every rank."""
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Send the source's weights, and return when every worker has loaded them. Called on every rank; blocks.

        Raises TransferFailedError or EngineError if a worker did not get them. The old version then serves, and the
        next call sends again. If the answer to the call that begins or ends the update is lost, the workers join again,
        and say what they have done.
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
        self._start()
        try:
            if not self._transfer(WeightSource(source.metadata, source.read, one_shot=True)):
                raise TransferFailedError(
                    f"version {self.version} is not in vLLM; {self._workers.consequence}",
                    why=self._workers.failure or "the workers did not take it",
                    fix="send it again; vLLM's log has more",
                )
            self._workers.install()
        except BaseException:
            self._link.close()
            self._link = self._join()  # also the workers that were excluded
            raise
        finally:
            self._finish()

    def _start(self) -> None:
        if self._is_unsure:
            self._join_again()
        try:
            self._client.start_weight_update()
        except Exception as exc:  # noqa: BLE001 - of any client
            _log.warning("the workers may have begun an update; they join again: %s", exc)
            self._join_again()
            self._client.start_weight_update()

    def _finish(self) -> None:
        try:
            self._client.finish_weight_update()
        except Exception as exc:  # noqa: BLE001 - of any client
            _log.warning("the workers may not have ended the update; they join again: %s", exc)
            self._join_again()

    def _join_again(self) -> None:
        """Let the workers say whether an update is under way, and end it. They may not be told twice to begin one."""
        self._is_unsure = True
        self._link.close()
        self._workers.join()
        self._link = self._join()
        self._is_unsure = False

    def _join(self) -> EngineModels:
        engine: Any = self._workers  # the part of an engine that takes offers
        names: Any = {"address": store_address(self._store), "name": POLICY, "replica": "vllm"}
        return EngineModels(engine, self._beside, **names, timeout_s=self._init.timeout_s, newest=False)

    def _transfer(self, source: WeightSource) -> bool:
        """Send a version here while the workers receive it, in calls of another thread; return whether all did."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(self._receive, ended)
            try:
                self._sender.publish(self.version, source)
            except TransferFailedError:
                ended.set()
                receiving.result()  # a worker's own failure says more
                raise
            finally:
                ended.set()
            return receiving.result()

    def _receive(self, ended: threading.Event) -> bool:
        while True:
            is_last = ended.wait(0.005)
            if self._link.look():
                return self._link.load(incarnation=0) is not None
            if is_last:
                return False


class _Workers:
    """vLLM's workers as the receivers of one engine; they answer in the store."""

    version = -1
    failure = ""
    """Why the workers have not received the newest version."""

    def __init__(self, client: TransferClient, store: Store, *, address: str, keeps_old: bool) -> None:
        self._client, self._store, self._address, self._keeps_old = client, store, address, keeps_old
        self._calls = self._proposal = 0
        self.consequence = "the old version serves" if keeps_old else "its weights are of two versions"
        self.join()

    def join(self) -> None:
        """Let all workers join, perhaps again, and end the update that they are in, if they are."""
        for number in range(int(self._store.add(WORKERS, 0))):
            self._store.delete_key(answer_key(0, number))
        self._store.delete_key(WORKERS)
        self._client.init_weight_transfer_engine({"store": self._address, "keep_old_version": self._keeps_old})
        self.receivers = int(self._store.add(WORKERS, 0))
        joined = self._answers(0)
        self._ranks = [one["rank"] for one in joined]
        _require_all(self._ranks, of=max((one["of"] for one in joined), default=1))
        if any(one["updating"] for one in joined):  # its trainer died in the update, or its message at the end was lost
            self._client.finish_weight_update()

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError if the weights belong to another model; nothing is overwritten."""
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        self._call("the old version serves", shapes=shapes)

    def receive_weights(self, offer: WeightOffer) -> int | None:
        """Let the workers take ``offer``; return the proposal that all of them have, None if they have none."""
        taken = self._call(self.consequence, offer=asdict(offer))
        self.failure = self._told(one.proposal == 0 and one.why for one in taken)
        found = {one.proposal for one in taken}
        self._proposal = found.pop() if len(found) == 1 else 0
        return self._proposal or None

    def install(self) -> None:
        """Load the received version into the model of every worker, if it is not there yet."""
        if self._keeps_old:
            self._call("its weights are of two versions, until a whole version is sent", install=self._proposal)

    def _call(self, consequence: str, **what: Any) -> list[Taken]:
        self._calls += 1
        self._client.update_weights({"call": self._calls, **what})
        taken = [Taken(**answer) for answer in self._answers(self._calls)]
        why = self._told(one.fault and one.why for one in taken)
        if why:
            raise EngineError(f"vLLM failed in an update; {consequence}", why=why, fix="see vLLM's log")
        return taken

    def _told(self, reasons: Iterable[str | bool]) -> str:
        """Return the workers' reasons; False is none."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in zip(self._ranks, reasons, strict=True) if why)

    def _answers(self, call: int) -> list[dict[str, Any]]:
        keys = [answer_key(call, number) for number in range(self.receivers)]
        missing = await_keys(self._store, keys, timeout_s=_ANSWER_S)
        if missing:
            raise EngineError("workers of vLLM did not answer", why=f"no {', '.join(missing)}", fix="see vLLM's log")
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
        self._is_read = True
        yield from self._source

    def drain(self) -> None:
        if not self._is_read:
            collections.deque(self.read(), maxlen=0)


def _require_all(ranks: Sequence[int], *, of: int) -> None:
    """Raise EngineError unless ``ranks`` has each rank of one engine or more, which have ``of`` workers each."""
    counts = collections.Counter(ranks)
    if {counts[rank] for rank in range(of)} != {max(counts.values(), default=1)}:
        raise EngineError(
            "not all of vLLM's workers have joined",
            why=f"of {of} ranks only these have: {sorted(ranks)}",
            fix="can they reach TransferTrainerInit.host? vLLM's log has the reason",
        )
