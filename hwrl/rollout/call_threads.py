"""Threads for calls that may block, or hang."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

_Returned = TypeVar("_Returned")
_Parameters = ParamSpec("_Parameters")


@dataclass(eq=False)
class Caller:
    """The maker of the calls of a context. Nobody waits for the calls of one that is ``abandoned``."""

    abandoned: bool = False


current_caller: contextvars.ContextVar[Caller | None] = contextvars.ContextVar("hwrl_caller", default=None)
"""Set it in the context that submits the calls."""


@dataclass(eq=False)
class _ThreadCall:
    future: Future[Any]
    function: Callable[[], Any]
    caller: Caller | None

    def outcome(self) -> tuple[Any, BaseException | None]:
        try:
            return self.function(), None
        except BaseException as exc:  # noqa: BLE001 - it is the caller's
            return None, exc

    def end(self, result: Any, error: BaseException | None) -> None:
        with contextlib.suppress(InvalidStateError):  # nobody waits any longer
            self.future.set_result(result) if error is None else self.future.set_exception(error)


class CallThreads(ThreadPoolExecutor):
    """Runs calls in up to ``at_once`` daemon threads, called ``name``. An executor for an event loop.

    A thread takes the next call after one that ended, so thread-local state stays. If the future of a running call is
    cancelled, or its caller is abandoned, the call has no place among the ``at_once`` any longer, and its thread ends
    with it. So calls that hang delay neither other calls nor the end of the process. A call of an abandoned caller has
    a thread of its own.
    """

    def __init__(self, at_once: int, name: str) -> None:
        super().__init__(at_once, name)  # event loops take no other kind of executor; this one never uses its pool
        self._name, self._at_once = name, at_once
        self._queue: deque[_ThreadCall] = deque()
        self._running: dict[Future[Any], Caller | None] = {}  # the calls that have a place
        self._idle = 0  # threads that wait for a call, or are about to take one
        self._is_shut = False
        self._changed = threading.Condition()

    def submit(
        self, fn: Callable[_Parameters, _Returned], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> Future[_Returned]:
        """Run ``fn`` as soon as there is a place. Does not block."""
        future: Future[_Returned] = Future()
        call = _ThreadCall(future, functools.partial(fn, *args, **kwargs), current_caller.get())
        with self._changed:
            if self._is_shut:
                raise RuntimeError("these threads take no calls any longer")
            if call.caller is not None and call.caller.abandoned:
                self._begin(call)
            else:
                self._queue.append(call)
                self._begin_threads()
                self._changed.notify()
        return future

    def abandon(self, caller: Caller) -> None:
        """Set ``caller.abandoned``: its calls have no places from now on."""
        with self._changed:
            caller.abandoned = True
            self._running = {future: its for future, its in self._running.items() if its is not caller}
            for call in [call for call in self._queue if call.caller is caller]:
                self._queue.remove(call)
                self._begin(call)
            self._begin_threads()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as there
        """Let no queued call begin. Never waits for a running one."""
        with self._changed:
            self._is_shut = True
            self._queue.clear()
            self._changed.notify_all()

    def _begin_threads(self) -> None:
        """Begin the threads that the queue wants; without any, its calls fail."""
        while len(self._queue) > self._idle and len(self._running) + self._idle < self._at_once:
            if not self._begin():
                break

    def _begin(self, alone: _ThreadCall | None = None) -> bool:
        """Begin a thread for ``alone``, or one that takes queued calls; return whether the system has one."""
        try:
            threading.Thread(target=self._work, args=[alone], name=self._name, daemon=True).start()
        except RuntimeError as exc:
            hopeless = [alone] if alone else [] if self._running or self._idle else list(self._queue)
            for call in hopeless:
                call.end(None, exc)
            return False
        self._idle += alone is None
        return True

    def _give_up(self, future: Future[Any]) -> None:
        """Count the thread of a cancelled call no longer, if it still runs the call."""
        with self._changed:
            if future.cancelled() and future in self._running:
                del self._running[future]
                self._begin_threads()

    # -- in a thread --------------------------------------------------------------------------------------------

    def _work(self, alone: _ThreadCall | None) -> None:
        """Run the call ``alone``, or one queued call after another. A future stays pending, so it can be cancelled."""
        if alone is not None and not alone.future.done():
            alone.end(*alone.outcome())
        while alone is None and (call := self._take()) is not None:
            call.future.add_done_callback(self._give_up)
            result, error = call.outcome()
            with self._changed:  # before the end: the caller's next call finds this thread idle
                goes_on = call.future in self._running
                self._running.pop(call.future, None)
                self._idle += goes_on
            call.end(result, error)
            if not goes_on:
                return

    def _take(self) -> _ThreadCall | None:
        """Wait for the next call for which somebody waits; None if there will be none."""
        with self._changed:
            while True:
                while self._queue:
                    call = self._queue.popleft()
                    if not call.future.done():  # else it was cancelled
                        self._idle -= 1
                        self._running[call.future] = call.caller
                        return call
                if self._is_shut:
                    return None
                self._changed.wait()
