"""Attempts of a workflow: tasks with a time limit. One that ignores its cancellation is left behind."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

from hwrl.errors import short_repr
from hwrl.rollout.call_threads import Caller, CallThreads, current_caller

_log = logging.getLogger(__name__)
_Outcome: TypeAlias = tuple[Any, BaseException | None]


class Attempts:
    """Runs attempts in the event loop of the caller, for at most ``timeout_s`` each.

    An attempt over its limit is cancelled once. If it does not end within ``cancel_s`` then, it is abandoned: it may go
    on, to delete a sandbox for example, but nobody waits for it, and its result is never used. Its calls have no places
    among ``threads`` any longer.
    """

    def __init__(self, *, timeout_s: float, cancel_s: float, threads: CallThreads) -> None:
        self._timeout_s, self._cancel_s, self._threads = timeout_s, cancel_s, threads
        self.abandoned: set[asyncio.Task[_Outcome]] = set()
        """The tasks of abandoned attempts that have not ended yet."""

    async def run(self, call: Callable[[], Awaitable[Any]]) -> tuple[Any, str]:
        """Return the result of ``call()`` and ""; or None and the reason why the attempt failed.

        ``call`` runs in a task of its own with the caller's context variables. If the caller is cancelled, the attempt
        is, too, and has up to ``cancel_s`` to end before this raises CancelledError. A caller that is cancelled while
        the attempt ends does not cut that short.
        """
        attempt, context = Caller(), contextvars.copy_context()
        context.run(current_caller.set, attempt)
        task = asyncio.Task(_outcome(call), loop=asyncio.get_running_loop(), context=context)
        try:
            in_time, _ = await asyncio.wait([task], timeout=self._timeout_s)
        except asyncio.CancelledError:
            await self._end(task, attempt)
            raise
        if not in_time:
            return None, await self._end(task, attempt)
        result, error = _outcome_of(task)
        return (result, "") if error is None else (None, f"the workflow raised {short_repr(error)}")

    async def _end(self, task: asyncio.Task[_Outcome], attempt: Caller) -> str:
        """Cancel ``task``, and abandon it if it does not end. Return why the attempt failed."""
        reason = f"the workflow did not return within {self._timeout_s:g} s"
        task.cancel()
        try:
            await _wait_out(task, self._cancel_s)
        finally:
            if not task.done():
                self._leave_behind(task, attempt)
        if not task.done():
            return f"{reason}, did not end within {self._cancel_s:g} s of its cancellation, and was abandoned"
        _, error = _outcome_of(task)
        return (
            reason if error is None or isinstance(error, asyncio.CancelledError) else f"{reason}: {short_repr(error)}"
        )

    def _leave_behind(self, task: asyncio.Task[_Outcome], attempt: Caller) -> None:
        _log.warning("a run of the workflow did not end within %g s of its cancellation: abandoned", self._cancel_s)
        # Never collected: the collector would throw GeneratorExit into the user's code, in any thread, also at exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
        self.abandoned.add(task)
        self._threads.abandon(attempt)
        task.add_done_callback(self.abandoned.discard)
        task.add_done_callback(lambda done: ctypes.pythonapi.Py_DecRef(ctypes.py_object(done)))


async def hold_if_abandoned() -> None:
    """Never return in an abandoned attempt, and in tasks that it starts; elsewhere return at once.

    An error instead could let a loop that catches everything block the event loop.
    """
    attempt = current_caller.get()
    if attempt is not None and attempt.abandoned:
        await asyncio.get_running_loop().create_future()


async def _wait_out(task: asyncio.Task[Any], timeout_s: float) -> None:
    """Wait until ``task`` has ended, for up to ``timeout_s``. A cancellation is raised after that."""
    loop, cancelled = asyncio.get_running_loop(), None
    deadline_s = loop.time() + timeout_s
    while not task.done() and (left_s := deadline_s - loop.time()) > 0:
        try:
            await asyncio.wait([task], timeout=left_s)
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        raise cancelled


async def _outcome(call: Callable[[], Awaitable[Any]]) -> _Outcome:
    """Return the result of ``call``, or its error as a value: asyncio would end the loop for a SystemExit."""
    try:
        return await call(), None
    except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
        return None, exc


def _outcome_of(task: asyncio.Task[_Outcome]) -> _Outcome:
    return (None, asyncio.CancelledError()) if task.cancelled() else task.result()
