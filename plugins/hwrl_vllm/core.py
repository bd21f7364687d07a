"""vLLM's engine core schedules and runs the steps, in this process or in a process of its own."""

from __future__ import annotations

import queue
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from hwrl_vllm.scheduler import NewTokens, unpack


class Core(ABC):
    """The engine core behind vLLM's ``client``. It runs ahead: it begins steps before hwrl needs their tokens.

    The caller gives each request an id of its own. After :meth:`abort` tokens of a dropped request may still come.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def add(self, request: Any) -> None:
        """Queue ``request``, an ``EngineCoreRequest``."""
        self._client.add_request(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; ids that vLLM does not know are ignored."""
        self._client.abort_requests(list(request_ids))

    @property
    def has_ended(self) -> bool:
        """Whether the engine core's process has ended, so that a new engine is needed."""
        return False

    @abstractmethod
    def next_tokens(self) -> list[NewTokens]:
        """Wait for new tokens and return all that have come. Blocks, so call it only while a request runs."""

    @abstractmethod
    def pause(self) -> list[NewTokens]:
        """Begin no more steps. Wait for the steps that have begun, and return their tokens. Requests stay queued."""

    def resume(self) -> None:
        """Begin steps again, after :meth:`pause`."""
        self.call("resume_scheduler")

    @abstractmethod
    def call(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the engine core, and return its result. Blocks."""

    def call_workers(self, method: Any, *args: Any, timeout_s: float | None = None) -> list[Any]:
        """Call ``method`` in each worker, and return the results in rank order. Blocks.

        ``args`` travel to another process as msgpack. ``timeout_s`` limits the wait for workers in processes of their
        own. After a timeout these workers cannot be used again.
        """
        return list(self.call("collective_rpc", method, timeout_s, args, None))

    def sleep(self, level: int) -> None:
        """Free device memory, by vLLM's sleep ``level``. No request may be pending."""
        self.call("sleep", level, "abort")

    def wake(self, tags: Sequence[str]) -> None:
        """Allocate device memory for ``tags`` again."""
        self.call("wake_up", list(tags))

    def close(self) -> None:
        """End the engine core and its workers."""
        self._client.shutdown()


class InlineCore(Core):
    """The engine core in this process. It steps only in calls of this class; the device may be one step ahead."""

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        executor = client.engine_core.model_executor
        self._queues = [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]

    def next_tokens(self) -> list[NewTokens]:
        tokens: list[NewTokens] = []
        while not tokens and self._has_work():
            tokens = unpack(self._client.get_output().outputs)
        return tokens

    def pause(self) -> list[NewTokens]:
        self.call("pause_scheduler", "keep", False)
        tokens: list[NewTokens] = []
        while self._has_work():
            tokens += unpack(self._client.get_output().outputs)
        return tokens

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self._client.engine_core, method)(*args)

    def close(self) -> None:
        """End the engine core and its workers."""
        try:
            super().close()
        finally:  # before 0.32 vLLM leaves these sockets open if a worker has died; zmq would wait for them for ever
            for link in self._queues:
                for name in ("local_socket", "remote_socket"):
                    if (socket := getattr(link, name, None)) is not None:
                        socket.close(linger=0)
            self._queues = []

    def _has_work(self) -> bool:
        core = self._client.engine_core
        return bool(core.batch_queue) or core.scheduler.has_requests()


class ProcessCore(Core):
    """The engine core in a process of its own. It steps without calls while it has requests.

    vLLM's client waits for ever if that process dies. So this class waits by itself, and checks every ``look_s``
    whether the process is alive.
    """

    def __init__(self, client: Any, *, look_s: float = 1.0) -> None:
        super().__init__(client)
        self._look_s = look_s

    @property
    def has_ended(self) -> bool:
        return bool(self._client.resources.engine_dead)

    def next_tokens(self) -> list[NewTokens]:
        while True:
            try:
                return self._drain([self._client.outputs_queue.get(timeout=self._look_s)])
            except queue.Empty:
                self._require_alive()

    def pause(self) -> list[NewTokens]:
        self.call("pause_scheduler", "keep", False)
        return self._drain([])  # the tokens came before the reply, through the same socket

    def call(self, method: str, *args: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequestType

        call_id, future = uuid.uuid4().int >> 65, Future[Any]()
        self._client.utility_results[call_id] = future
        self._client._send_input(EngineCoreRequestType.UTILITY, (0, call_id, method, args))
        while True:
            try:
                return future.result(timeout=self._look_s)
            except TimeoutError:
                if future.done():
                    raise
                self._require_alive()
            except Exception as exc:  # vLLM passes on the message of the other process's error, and not its class
                if "out of memory" in str(exc):
                    raise torch.OutOfMemoryError(str(exc)) from exc
                raise

    def _require_alive(self) -> None:
        """Raise an error if the process has ended, or if vLLM's thread that reads its answers has ended."""
        self._client.ensure_alive()
        if not self._client.output_queue_thread.is_alive():
            self._drain([])  # raises the thread's error if it left one
            raise RuntimeError("the thread that reads the answers of vLLM's process has ended")

    def _drain(self, items: Iterable[Any]) -> list[NewTokens]:
        """Empty the queue. Return the tokens in ``items`` and in the queue; raise the first error among them."""
        items = [*items]
        while not self._client.outputs_queue.empty():
            items.append(self._client.outputs_queue.get_nowait())
        for item in items:
            if isinstance(item, Exception):
                raise item
        return [tokens for item in items for tokens in unpack(item.outputs)]


def core_of(client: Any) -> Core:
    """Return the engine core behind vLLM's ``client``; only a client of an inline one has ``engine_core``."""
    return InlineCore(client) if hasattr(client, "engine_core") else ProcessCore(client)
