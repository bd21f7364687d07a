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
        self._workers = self._idle = 0  # idle workers wait for a call, or are about to take one
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
            is_abandoned = call.caller is not None and call.caller.abandoned
            if not is_abandoned:
                self._queue.append(call)
                self._changed.notify()
        self._run_alone(call) if is_abandoned else self._add_workers()
        return future

    def abandon(self, caller: Caller) -> None:
        """Set ``caller.abandoned``: its calls have no places from now on."""
        with self._changed:
            caller.abandoned = True
            running = [future for future, its in self._running.items() if its is caller]
            queued = [call for call in self._queue if call.caller is caller]
            for call in queued:
                self._queue.remove(call)
        for future in running:
            self._give_up(future)
        for call in queued:
            self._run_alone(call)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as there
        """Let no queued call begin. Never waits for a running one."""
        with self._changed:
            self._is_shut = True
            self._queue.clear()
            self._changed.notify_all()

    # -- threads begin and are given up -------------------------------------------------------------------------

    def _run_alone(self, call: _ThreadCall) -> None:
        if call.future.done():
            return  # it was cancelled in the queue
        try:
            self._begin(lambda: call.end(*call.outcome()))
        except RuntimeError as exc:  # the system has no more threads
            call.end(None, exc)

    def _add_workers(self) -> None:
        """Begin the workers that the queue wants."""
        while self._add_worker():
            try:
                self._begin(self._work)
            except RuntimeError as exc:
                self._lose_worker(exc)
                return

    def _begin(self, function: Callable[[], Any]) -> None:
        threading.Thread(target=function, name=self._name, daemon=True).start()

    def _add_worker(self) -> bool:
        """Count one more worker if the queue wants it and there is room; return whether."""
        with self._changed:
            wanted = len(self._queue) > self._idle and self._workers < self._at_once
            self._workers, self._idle = self._workers + wanted, self._idle + wanted
            return wanted

    def _lose_worker(self, error: RuntimeError) -> None:
        """Count a worker less that could not begin. If none is left, the queued calls fail with ``error``."""
        with self._changed:
            self._workers, self._idle = self._workers - 1, self._idle - 1
            hopeless = [] if self._workers else list(self._queue)
            if hopeless:
                self._queue.clear()
        for call in hopeless:
            call.end(None, error)

    def _note_end(self, future: Future[Any]) -> None:
        if future.cancelled():
            self._give_up(future)

    def _give_up(self, future: Future[Any]) -> None:
        """Count the worker of this call no longer, if it still runs the call."""
        with self._changed:
            if future not in self._running:
                return
            del self._running[future]
            self._workers -= 1
        self._add_workers()

    # -- in a worker --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Run the next call. Its future stays pending, so that it can be cancelled. Return whether to go on."""
        call = self._take()
        if call is None:
            return False
        call.future.add_done_callback(self._note_end)
        result, error = call.outcome()
        goes_on = self._free(call.future)  # before the end: the caller's next call finds this worker idle
        call.end(result, error)
        return goes_on

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
                    self._workers, self._idle = self._workers - 1, self._idle - 1
                    return None
                self._changed.wait()

    def _free(self, future: Future[Any]) -> bool:
        """Return whether the worker of this call still counts; then it is idle."""
        with self._changed:
            if future not in self._running:
                return False
            del self._running[future]
            self._idle += 1
            return True
