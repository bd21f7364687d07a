"""The trainer's end of vLLM's weight transfer, for any trainer. The trainer's process needs no vLLM."""

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
"""The key in the store for the number of workers that have joined."""

_ANSWER_S = 10.0
"""Seconds to wait for the workers' answers after a call. They wrote them before it returned, unless they failed."""


def answer_key(call: int, number: int) -> str:
    """Return the key in the store for worker ``number``'s answer to call ``call``. Call 0 is the join."""
    return f"vllm/answers/{call}/{number}"


class TransferClient(Protocol):
    """Calls all of vLLM's workers, like vLLM's ``VLLMWeightSyncClient``. Each method blocks until all have returned."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let the workers join a trainer. ``init_info`` has the fields of ``TransferInit``."""

    def start_weight_update(self) -> None:
        """Begin an update."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do one step of the update. ``update_info`` has the fields of ``TransferUpdate``."""

    def finish_weight_update(self) -> None:
        """End the update."""


@dataclass(kw_only=True)
class TransferTrainerInit:
    """The settings of :class:`TransferTrainer`.

    ``rank`` is this process's rank among the trainer's; rank 0 sends. ``host`` is the address of this machine by which
    the workers reach it. ``transport``, ``bucket_nbytes`` and ``timeout_s`` are those of
    :class:`~hwrl.weights.WeightSender`. With ``keep_old_version`` each worker holds its part of a second version during
    an update, and the old version serves until all workers have the new one. Without it versions are loaded in place.
    """

    backend: ClassVar[str] = "hwrl"
    rank: int = 0
    host: str = "127.0.0.1"
    transport: str = "device"
    keep_old_version: bool = True
    timeout_s: float = 60.0
    bucket_nbytes: int | None = None

    @property
    def is_sender(self) -> bool:
        """Whether this rank sends."""
        return self.rank == 0


class TransferTrainer:
    """Sends the weights of ``source`` to the vLLM behind ``client``.

    It has the interface of vLLM's ``TrainerWeightTransferEngine``. ``source`` is a :class:`~hwrl.weights.WeightSource`
    or vLLM's. Each update reads it once, on every rank, to its end. Only rank 0 (``init_info.rank``) needs whole
    tensors and calls the client. Use it from one thread. Blocks until all workers have joined; raises EngineError if
    they do not.
    """

    def __init__(self, init_info: TransferTrainerInit, *, client: TransferClient, source: Any) -> None:
        self._init, self._client, self._source = init_info, client, source
        self.version = 0
        """The number of calls of :meth:`send_weights`, failed calls included. Each call's number is its version."""
        self.changed_share: float | None = None
        """The :attr:`~hwrl.weights.TransferReport.changed_share` of the newest version, on rank 0."""
        if not init_info.is_sender:
            return
        self._store = serve_store(init_info.host)
        self._beside = clone_store(self._store)  # for the calling thread: one store's threads wait for each other
        address = store_address(self._store)
        self._workers = _Workers(client, self._beside, address=address, keeps_old=init_info.keep_old_version)
        self._link = self._join()
        self._is_unsure = False
        """Whether the workers may be in an update of which this process does not know."""
        self._sender = WeightSender(
            self._store,
            transport=init_info.transport,
            bucket_nbytes=init_info.bucket_nbytes,
            timeout_s=init_info.timeout_s,
        )

    @property
    def has_whole_version(self) -> bool:
        """Whether vLLM's weights are of one version, old or new, as far as rank 0 knows. If not, send again first."""
        return not self._init.is_sender or self._workers.has_whole_version

    @classmethod
    def trainer_init(cls, init_info: TransferTrainerInit, *, client: TransferClient, source: Any) -> TransferTrainer:
        """Return the trainer's end after all workers have joined. Call it on every rank."""
        return cls(init_info, client=client, source=source)

    def send_weights(self) -> None:
        """Send the source's weights, and return when every worker has loaded them. Call it on every rank; it blocks.

        Raises TransferFailedError or EngineError if a worker did not get them. The error says which version serves;
        with ``keep_old_version`` it is the old one, unless a worker failed in loading. The next call sends again. The
        answer to the call that begins or ends an update may be lost. Then the workers join again, and their answers
        say whether they are in an update.
        """
        self.version += 1
        source = _OnePass(self._source)
        try:
            if self._init.is_sender:
                self._update(source)
        finally:
            source.drain()  # reading may be collective, so every rank reads to the end

    def shutdown(self) -> None:
        """Close the connections. May be called again."""
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
            self._link = self._join()  # workers that the sender excluded join again, too
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
        """Let the workers join again, and end their update if they are in one: vLLM allows no second start."""
        self._is_unsure = True
        self._link.close()
        self._workers.join()
        self._link = self._join()
        self._is_unsure = False

    def _join(self) -> EngineModels:
        engine: Any = self._workers  # it has the methods of an engine that receive weights
        timeout_s = self._init.timeout_s
        return EngineModels(engine, self._beside, name=POLICY, replica="vllm", timeout_s=timeout_s, newest=False)

    def _transfer(self, source: WeightSource) -> bool:
        """Send a version. Meanwhile another thread calls the workers, which receive it. Return whether all have it."""
        ended = threading.Event()
        with ThreadPoolExecutor(1) as thread:
            receiving = thread.submit(self._receive, ended)
            try:
                self.changed_share = self._sender.publish(self.version, source).changed_share
                _log.info("version %d: share of the weights that changed: %s", self.version, self.changed_share)
            except TransferFailedError:
                ended.set()
                receiving.result()  # raises a worker's own error, which says more
                raise
            finally:
                ended.set()
            return receiving.result()

    def _receive(self, ended: threading.Event) -> bool:
        """Wait for an offer, and let the workers take it. Return False if sending has ended without one."""
        while True:
            is_last = ended.wait(0.005)
            if self._link.look():
                return self._link.update()
            if is_last:
                return False


class _Workers:
    """vLLM's workers, as the receivers of one engine. Calls return no results, so workers answer in the store."""

    version = -1
    has_whole_version = True
    failure = ""
    """Why workers do not have the newest version; empty if all have it."""

    def __init__(self, client: TransferClient, store: Store, *, address: str, keeps_old: bool) -> None:
        self._client, self._store, self._address, self._keeps_old = client, store, address, keeps_old
        self._calls = self._proposal = 0
        self.consequence = "the old version serves" if keeps_old else "its weights are of two versions"
        self.join()

    def join(self) -> None:
        """Let all workers join, for the first time or again. If they are in an update, end it."""
        for number in range(int(self._store.add(WORKERS, 0))):
            self._store.delete_key(answer_key(0, number))
        self._store.delete_key(WORKERS)
        self._client.init_weight_transfer_engine({"store": self._address, "keep_old_version": self._keeps_old})
        self.receivers = int(self._store.add(WORKERS, 0))
        joined = self._answers(0)
        self._ranks = [one["rank"] for one in joined]
        _require_all(self._ranks, of=max((one["of"] for one in joined), default=1))
        if any(one["updating"] for one in joined):  # a former trainer died in it, or the call that ends it was lost
            self._client.finish_weight_update()

    def check_weights(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Raise EngineError if ``tensors`` are another model's; nothing is overwritten then."""
        shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
        self._call("the old version serves", shapes=shapes)

    def receive_weights(self, offer: WeightOffer) -> int | None:
        """Let the workers take ``offer``. Return the number of the proposal that all of them have, or None."""
        self.has_whole_version = self._keeps_old
        taken = self._call(self.consequence, offer=asdict(offer))
        self.failure = self._reasons(one.proposal == 0 and one.why for one in taken)
        found = {one.proposal for one in taken}
        self._proposal = found.pop() if len(found) == 1 else 0
        self.has_whole_version = self._keeps_old or self._proposal > 0
        return self._proposal or None

    def install(self) -> None:
        """Load the received version into every worker's model. Without ``keeps_old`` it is there already."""
        if self._keeps_old:
            self.has_whole_version = False
            self._call("its weights are of two versions, until a whole version is sent", install=self._proposal)
            self.has_whole_version = True

    def _call(self, consequence: str, **what: Any) -> list[Taken]:
        """Call the workers with the fields ``what`` of ``TransferUpdate``, and return their answers.

        Raises EngineError, with ``consequence``, if a worker failed.
        """
        self._calls += 1
        self._client.update_weights({"call": self._calls, **what})
        taken = [Taken(**answer) for answer in self._answers(self._calls)]
        why = self._reasons(one.fault and one.why for one in taken)
        if why:
            raise EngineError(f"vLLM failed in an update; {consequence}", why=why, fix="see vLLM's log")
        return taken

    def _reasons(self, reasons: Iterable[str | bool]) -> str:
        """Join the workers' ``reasons``, each with its rank; False or "" is no reason."""
        return "; ".join(f"rank {rank}: {why}" for rank, why in zip(self._ranks, reasons, strict=True) if why)

    def _answers(self, call: int) -> list[dict[str, Any]]:
        """Take all workers' answers to ``call`` out of the store. Raises EngineError if one is missing."""
        keys = [answer_key(call, number) for number in range(self.receivers)]
        missing = await_keys(self._store, keys, timeout_s=_ANSWER_S)
        if missing:
            raise EngineError("workers of vLLM did not answer", why=f"no {', '.join(missing)}", fix="see vLLM's log")
        answers = [json.loads(self._store.get(key)) for key in keys]
        for key in keys:
            self._store.delete_key(key)
        return answers


class _OnePass:
    """A source of weights for one update. The ranks may read it together, so each rank reads it exactly once."""

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
        """Read the source to its end if nobody has begun to; the sender ends a read that it has begun."""
        if not self._is_read:
            collections.deque(self.read(), maxlen=0)


def _require_all(ranks: Sequence[int], *, of: int) -> None:
    """Raise EngineError unless ``ranks`` has each of the ``of`` ranks, all equally often: once for each engine."""
    counts = collections.Counter(ranks)
    if {counts[rank] for rank in range(of)} != {max(counts.values(), default=1)}:
        raise EngineError(
            "not all of vLLM's workers have joined",
            why=f"of {of} ranks only these have: {sorted(ranks)}",
            fix="can they reach TransferTrainerInit.host? vLLM's log has the reason",
        )
