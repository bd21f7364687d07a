"""Ends of a weight link for ``async`` code. Each has a thread in which the end of :mod:`hwrl.weights` is used."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.interfaces import Backend
from hwrl.weights.control import Metadata
from hwrl.weights.layout import NamedTensor
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import WeightSender
from hwrl.weights.source import WeightSource
from hwrl.weights.streaming import IncomingVersion, StreamReceiver


class _End(Protocol):
    """An end of a weight link."""

    def close(self) -> None: ...


class _ReceivingEnd(_End, Protocol):
    """An end of a weight link that receives."""

    def join(self) -> None: ...


_Result = TypeVar("_Result")
_Self = TypeVar("_Self", bound="_AsyncEnd[Any]")
_AnyEnd = TypeVar("_AnyEnd", bound=_End)
_AnyReceiver = TypeVar("_AnyReceiver", bound=_ReceivingEnd)


class _EndThread:
    """The thread of one end; its current device is that of the thread that made it."""

    def __init__(self, backend: Backend) -> None:
        use_device = functools.partial(backend.set_device, backend.current_index())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hwrl-weights", initializer=use_device)
        self._ended = False

    async def run(
        self, call: Callable[..., _Result], *args: Any, cancel: Callable[[], None] | None = None, **options: Any
    ) -> _Result:
        """Run ``call`` in the thread. A cancelled wait calls ``cancel``, and waits for the end of the call."""
        work = asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(call, *args, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if cancel is not None and not work.done():
                cancel()
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):  # it is about to be raised
                    await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # it is the cancellation's result, and nobody else reads it
            raise

    async def end(self, close: Callable[[], None]) -> None:
        """Run ``close`` in the thread, and end the thread; does nothing if it has ended."""
        if self._ended:
            return
        self._ended = True
        try:
            await self.run(close)
        finally:
            self._pool.shutdown(wait=False)


class _AsyncEnd(Generic[_AnyEnd]):
    """An end made with ``options`` by ``make``, and its thread. A context manager."""

    def __init__(self, make: Callable[..., _AnyEnd], store: Store, options: Mapping[str, Any]) -> None:
        self._thread = _EndThread(backend_or_default(options.get("backend")))
        self._end = make(store, **options)

    async def close(self) -> None:
        """Close the end of the link, and end its thread."""
        await self._thread.end(self._end.close)

    async def __aenter__(self: _Self) -> _Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()


class _AsyncReceivingEnd(_AsyncEnd[_AnyReceiver]):
    """A receiver and its thread."""

    @property
    def receiver(self) -> _AnyReceiver:
        """The receiver, for its ``version``."""
        return self._end

    async def join(self) -> None:
        """Request versions again, as :meth:`~hwrl.weights.WeightReceiver.join` does."""
        await self._thread.run(self._end.join)


class AsyncWeightSender(_AsyncEnd[WeightSender]):
    """A :class:`~hwrl.weights.WeightSender` for ``async`` code; takes the same options.

    Calls run in one thread, one after the other, and ``weights`` are read there. A cancelled ``publish`` goes on to its
    end first: the tensors are being read.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(WeightSender, store, options)

    @property
    def sender(self) -> WeightSender:
        """The sender. Its ``version`` and ``remove`` may be used from any thread."""
        return self._end

    async def publish(
        self,
        version: int,
        weights: WeightSource | Iterable[NamedTensor],
        metadata: Metadata | None = None,
        *,
        to: Collection[str] | None = None,
        again: bool = False,
    ) -> TransferReport:
        """Send ``weights``; see :meth:`~hwrl.weights.WeightSender.publish`."""
        return await self._thread.run(self.sender.publish, version, weights, metadata, to=to, again=again)

    async def wait_for_receivers(self, receivers: int | Collection[str], *, timeout_s: float = 60.0) -> None:
        """Wait until receivers have joined; see :meth:`~hwrl.weights.WeightSender.wait_for_receivers`."""
        await self._thread.run(self.sender.wait_for_receivers, receivers, timeout_s=timeout_s)

    async def release(self) -> None:
        """Close the connections and free their device memory, as :meth:`~hwrl.weights.WeightSender.release` does."""
        await self._thread.run(self.sender.release)


class AsyncWeightReceiver(_AsyncReceivingEnd[WeightReceiver]):
    """A :class:`~hwrl.weights.WeightReceiver` for ``async`` code; takes the same options.

    A cancelled ``receive`` ends as :meth:`~hwrl.weights.WeightReceiver.cancel` says, within a fifth of a second while
    it waits.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(WeightReceiver, store, options)

    async def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Wait for the newest version; see :meth:`~hwrl.weights.WeightReceiver.receive`."""
        try:
            return await self._thread.run(self.receiver.receive, timeout_s=timeout_s, cancel=self.receiver.cancel)
        finally:
            self.receiver.forget_cancellation()


class AsyncStreamReceiver(_AsyncReceivingEnd[StreamReceiver]):
    """A :class:`~hwrl.weights.StreamReceiver` for ``async`` code; takes the same options."""

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(StreamReceiver, store, options)

    async def stream(self, *, timeout_s: float = 60.0) -> AsyncIterator[NamedTensor]:
        """Yield the newest version's tensors as they come; see :class:`~hwrl.weights.IncomingVersion`.

        The iterator ends when the version is committed, and raises an error if it is not. Close an iterator that is not
        read to its end (``aclose``): this ends the receive, as cancelling a wait for the next tensor does.
        """
        incoming = await self._thread.run(self.receiver.stream, timeout_s=timeout_s)
        try:
            while (pair := await self._thread.run(_next_of, incoming, cancel=incoming.cancel)) is not None:
                yield pair
        finally:
            await self._thread.run(incoming.close)


def _next_of(incoming: IncomingVersion) -> NamedTensor | None:
    with contextlib.suppress(StopIteration):
        return next(incoming)
    return None
