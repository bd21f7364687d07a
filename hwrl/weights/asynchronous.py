"""The ends of a weight link for ``async`` code. Each has its own thread, which makes the blocking calls.

Making an end connects and joins in the caller's thread, by a few round trips to the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, Protocol, TypeVar

from hwrl.comm import Store
from hwrl.discovery import backend_or_default
from hwrl.interfaces import Backend
from hwrl.weights.layout import NamedTensor
from hwrl.weights.messages import Metadata
from hwrl.weights.receiver import Received, WeightReceiver
from hwrl.weights.report import TransferReport
from hwrl.weights.sender import WeightSender
from hwrl.weights.source import Weights
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
    """The thread of one end. Its current device is the one of the thread that made it."""

    def __init__(self, backend: Backend) -> None:
        use_device = functools.partial(backend.set_device, backend.current_index())
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="hwrl-weights", initializer=use_device)
        self._ended = False

    async def run(
        self,
        call: Callable[..., _Result],
        *args: Any,
        cancel: Callable[[], None] | None = None,
        lost: Callable[[_Result], None] | None = None,
        **options: Any,
    ) -> _Result:
        """Run ``call`` in the thread. If the await is cancelled, call ``cancel``, and wait until the call has ended.

        If it has ended with a result nevertheless, ``lost`` gets the result.
        """
        work = asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(call, *args, **options))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            if cancel is not None and not work.done():
                cancel()
            while not work.done():
                with contextlib.suppress(asyncio.CancelledError):  # the first one is raised below
                    await asyncio.wait([work])
            if not work.cancelled() and work.exception() is None and lost is not None:
                lost(work.result())
            raise

    async def end(self, close: Callable[[], None]) -> None:
        """Run ``close`` in the thread, then end the thread. Does nothing if the thread has ended."""
        if self._ended:
            return
        self._ended = True
        try:
            await self.run(close)
        finally:
            self._pool.shutdown(wait=False)


class _AsyncEnd(Generic[_AnyEnd]):
    """An end that ``make`` makes with ``options``, and its thread. A context manager."""

    def __init__(self, make: Callable[..., _AnyEnd], store: Store, options: Mapping[str, Any]) -> None:
        self._thread = _EndThread(backend_or_default(options.get("backend")))
        self._end = make(store, **options)

    async def close(self) -> None:
        """Close the end of the link and end its thread."""
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
        """Join again; see :meth:`~hwrl.weights.WeightReceiver.join`."""
        await self._thread.run(self._end.join)


class AsyncWeightSender(_AsyncEnd[WeightSender]):
    """A :class:`~hwrl.weights.WeightSender` for ``async`` code; takes the same options.

    Calls run one after another in one thread, which also reads ``weights``. A cancelled ``publish`` still runs to its
    end before the cancellation is raised, because it is reading the tensors.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(WeightSender, store, options)

    @property
    def sender(self) -> WeightSender:
        """The sender. Any thread may use its ``version`` and ``remove``."""
        return self._end

    async def publish(
        self,
        version: int,
        weights: Weights,
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
        """Free the device memory; see :meth:`~hwrl.weights.WeightSender.release`."""
        await self._thread.run(self.sender.release)


class AsyncWeightReceiver(_AsyncReceivingEnd[WeightReceiver]):
    """A :class:`~hwrl.weights.WeightReceiver` for ``async`` code; takes the same options.

    Cancelling ``receive`` calls :meth:`~hwrl.weights.WeightReceiver.cancel`. A receive that waits for a version ends
    within a fifth of a second. If the version is committed when the cancellation comes, the next ``receive`` returns
    it.
    """

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(WeightReceiver, store, options)

    async def receive(self, *, timeout_s: float = 60.0) -> Received:
        """Wait for the newest version; see :meth:`~hwrl.weights.WeightReceiver.receive`."""
        receiver = self.receiver
        try:
            return await self._thread.run(
                receiver.receive, timeout_s=timeout_s, cancel=receiver.cancel, lost=receiver.put_back
            )
        finally:
            self.receiver.forget_cancellation()


class AsyncStreamReceiver(_AsyncReceivingEnd[StreamReceiver]):
    """A :class:`~hwrl.weights.StreamReceiver` for ``async`` code; takes the same options."""

    def __init__(self, store: Store, **options: Any) -> None:
        super().__init__(StreamReceiver, store, options)

    async def stream(self, *, timeout_s: float = 60.0) -> AsyncIterator[NamedTensor]:
        """Yield the newest version's tensors as they arrive; see :class:`~hwrl.weights.IncomingVersion`.

        The iterator ends when the version is committed, and raises an error if it is not. Close an iterator before its
        end with ``aclose``, which aborts the receive. Cancelling an await of the next tensor does the same. A version
        whose iterator did not reach its end counts as not received, whatever the sender has decided.
        """
        begun: list[IncomingVersion] = []
        try:
            await self._thread.run(lambda: begun.append(self.receiver.stream(timeout_s=timeout_s)))
            (incoming,) = begun
            while (pair := await self._thread.run(_next_of, incoming, cancel=incoming.cancel)) is not None:
                yield pair
        except BaseException:
            for incoming in begun:
                incoming.is_delivered = False  # the await that was cancelled may have got the end
            raise
        finally:
            for incoming in begun:  # also if the first await was cancelled
                await self._thread.run(incoming.close)


def _next_of(incoming: IncomingVersion) -> NamedTensor | None:
    with contextlib.suppress(StopIteration):
        return next(incoming)
    return None
