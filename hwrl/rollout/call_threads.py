"""Threads for calls that may block, or hang."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

_Returned = TypeVar("_Returned")
_Parameters = ParamSpec("_Parameters")


class CallThreads(ThreadPoolExecutor):
    """Runs each call in a daemon thread of its own, called ``name``. An executor for an event loop.

    At most ``at_once`` calls run that somebody waits for; the others queue. If the future of a running call is
    cancelled, the call has no place any longer, though its thread goes on. So calls that hang delay neither other calls
    nor the end of the process.
    """

    def __init__(self, at_once: int, name: str) -> None:
        super().__init__(at_once, name)  # event loops take no other kind of executor; this one never uses its pool
        self._name, self._places = name, at_once
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._guard = threading.Lock()

    def submit(
        self, fn: Callable[_Parameters, _Returned], /, *args: _Parameters.args, **kwargs: _Parameters.kwargs
    ) -> Future[_Returned]:
        """Run ``fn`` as soon as there is a place. Does not block."""
        future: Future[_Returned] = Future()
        with self._guard:
            self._calls.append((future, functools.partial(fn, *args, **kwargs)))
        self._begin_calls()
        return future

    def add_places(self, number: int) -> None:
        """Let ``number`` more calls run at once, or fewer if it is negative."""
        with self._guard:
            self._places += number
        self._begin_calls()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - as there
        """Let no queued call begin. Never waits for a running one."""
        with self._guard:
            self._calls.clear()

    def _begin_calls(self) -> None:
        while (work := self._next()) is not None:
            try:
                threading.Thread(target=self._run, args=work, name=self._name, daemon=True).start()
            except RuntimeError as exc:  # the system has no more threads
                with self._guard:
                    self._places += 1
                with contextlib.suppress(InvalidStateError):
                    work[0].set_exception(exc)

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """Take a place, and return the next call for which somebody waits; None if there is no place or no call."""
        with self._guard:
            while self._places > 0 and self._calls:
                future, call = self._calls.popleft()
                if not future.done():  # else it was cancelled
                    self._places -= 1
                    return future, call
            return None

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        """Run ``call``. Its future stays pending, so that it can be cancelled; either end gives the place back."""
        future.add_done_callback(lambda _: self.add_places(1))
        with contextlib.suppress(InvalidStateError):  # nobody waits any longer
            try:
                result = call()
            except BaseException as exc:  # noqa: BLE001 - it is the caller's
                future.set_exception(exc)
            else:
                future.set_result(result)
