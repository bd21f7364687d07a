"""Workflows: users' async functions that make a prompt's trajectories, with as many generations and tools as they like.

One event loop runs thousands of them at a time, in its own thread. The rollouter's thread owns the engine: it submits
the workflows' requests, and hands the responses back.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hwrl.errors import DataError, EngineError, short_repr
from hwrl.interfaces import (
    GenerationRequest,
    Ints,
    Response,
    RolloutEngine,
    Sampling,
    ToolParser,
    Trajectory,
)
from hwrl.rollout.attempts import Attempts, hold_if_abandoned
from hwrl.rollout.call_threads import CallThreads
from hwrl.rollout.chat import ChatTokens
from hwrl.rollout.checks import checked_sample
from hwrl.rollout.data import Prompt
from hwrl.rollout.generation import PendingGroup, SampleGenerator, limited
from hwrl.rollout.ledger import PromptLease
from hwrl.rollout.policy_client import PolicyClient
from hwrl.rollout.tool_calls import parse_tool_calls
from hwrl.rollout.tracing import current_log
from hwrl.user_code import load_function

_log = logging.getLogger(__name__)
_END_S = 5.0
"""How long tasks may take to end at the end of the loop. A workflow may block its thread; then that is left behind."""


class _BlockedLoopError(BaseException):
    """Raised inside of a run that blocks the event loop; no Exception, because a run may catch all of these."""

    def __repr__(self) -> str:
        return "BlockedLoopError: it held the event loop of all workflows for half of its time limit"


Workflow: TypeAlias = Callable[[PolicyClient, Prompt], Awaitable[Trajectory | Sequence[Trajectory]]]
"""Makes one sample of a prompt: one trajectory, or several."""


def load_workflow(target: str, options: Mapping[str, Any], *, tokenizer: Any, source: bytes | None = None) -> Workflow:
    """Return the workflow that the factory at ``target`` makes with ``tokenizer`` and ``options`` as keywords.

    ``source`` is as for :func:`~hwrl.user_code.load_function`. Raises DataError if the factory cannot be loaded, or
    makes no workflow.
    """
    factory = load_function(target, key="rollout.workflow", source=source)
    try:
        workflow = factory(tokenizer=tokenizer, **options)
        if not callable(workflow):
            raise TypeError(f"it returned {short_repr(workflow)}, and no async function of client and prompt")
    except (Exception, SystemExit) as exc:
        raise DataError(
            f"the factory {target} made no workflow",
            why=f"called with tokenizer=… and rollout.workflow_options={dict(options)!r}, it raised {short_repr(exc)}",
            fix="correct the options, or the factory",
        ) from exc
    return workflow  # type: ignore[no-any-return] # the user's; its results are checked


@dataclass(frozen=True, kw_only=True)
class WorkflowSettings:
    """How workflows run.

    A training group has ``group_size`` samples. At most ``max_samples`` samples run at once. Each has up to
    ``attempts`` attempts of at most ``timeout_s`` each. An attempt over that limit is cancelled, and abandoned if it
    does not end within ``cancel_s`` then. A conversation has at most ``max_length`` tokens, with ids below
    ``vocabulary``. The tokens ``end_ids`` end a response. ``parse_tools`` reads tool calls in the policy's text.
    """

    group_size: int
    max_samples: int
    max_length: int
    vocabulary: int
    timeout_s: float = 600.0
    cancel_s: float = 5.0
    attempts: int = 2
    end_ids: Collection[int] = ()
    parse_tools: ToolParser = parse_tool_calls


@dataclass(eq=False)
class _Request:
    """A workflow's request to the engine. ``drops`` is the number of calls of ``drop`` before its sample began."""

    token_ids: Ints
    sampling: Sampling
    answer: asyncio.Future[Response]
    drops: int


@dataclass(eq=False)
class _GroupRun:
    """An unfinished group. The event loop's thread owns ``tasks``; the rollouter's thread owns the rest."""

    group: PendingGroup
    client: PolicyClient
    tasks: list[asyncio.Task[Sequence[Trajectory] | str]] = field(default_factory=list)

    def cancel(self) -> None:
        for task in self.tasks:
            task.cancel()


class WorkflowGenerator(SampleGenerator):
    """The generator of workflows: a sample is a run of ``workflow``.

    A run has failed if it raises, returns no trajectory, or takes longer than its limit. It is repeated; after the last
    attempt its group has failed. A run that ignores its cancellation at the limit is abandoned.
    :class:`WorkflowSettings` has the limits. If a workflow stops waiting for a response, the response is dropped.
    """

    def __init__(
        self, engine: RolloutEngine, workflow: Workflow, *, tokenizer: Any, settings: WorkflowSettings
    ) -> None:
        self._engine, self._workflow, self._settings = engine, workflow, settings
        self._chat = ChatTokens(
            tokenizer, end_ids=settings.end_ids, parse_tools=settings.parse_tools, max_length=settings.max_length
        )
        self._runs: set[_GroupRun] = set()
        self._requests: deque[_Request] = deque()
        self._running: dict[int, _Request] = {}
        self._results: deque[tuple[_GroupRun, int, Sequence[Trajectory] | str]] = deque()
        self._numbers = itertools.count()
        self._drops = 0  # calls of drop
        self.failed_runs = 0
        """Runs of the workflow that failed so far, repeated or not."""
        threads = CallThreads(settings.max_samples, "workflow-tools")
        self._attempts = Attempts(timeout_s=settings.timeout_s, cancel_s=settings.cancel_s, threads=threads)
        self._slots = asyncio.Semaphore(settings.max_samples)
        self._loop_turned, self._turned_s = True, time.monotonic()  # since the last call of has_progress; when, at last
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(threads)
        self._closed = False
        self._thread = threading.Thread(target=self._run_loop, name="workflows", daemon=True)
        self._thread.start()

    # -- in the rollouter's thread ------------------------------------------------------------------------------

    def room(self) -> int:
        running = sum(run.group.size - len(run.group.samples) for run in self._runs)
        return self._settings.max_samples - running

    def pending(self) -> int:
        return len(self._runs)

    def has_work(self) -> bool:
        return bool(self._requests or self._results) or self._engine.pending() > 0

    def start(self, group: PendingGroup, sampling: Sampling) -> None:
        client = PolicyClient(
            functools.partial(self._generate, drops=self._drops),
            chat=self._chat,
            sampling=limited(sampling, group.prompt),
            max_length=self._settings.max_length,
            vocabulary=self._settings.vocabulary,
        )
        run = _GroupRun(group, client)
        self._runs.add(run)
        self._loop.call_soon_threadsafe(self._begin, run)

    def step(self) -> list[PendingGroup]:
        self._submit()
        if self._engine.pending():
            answers = []
            for completion in self._engine.step():
                self.tokens += len(completion.response.token_ids)
                answers.append((self._running.pop(completion.request_id).answer, completion.response))
            if answers:
                self._loop.call_soon_threadsafe(_answer, answers)
        return self._collect()

    def leases(self) -> list[PromptLease]:
        return [run.group.lease for run in self._runs if run.group.lease is not None]

    def has_progress(self, *, generated: bool) -> bool:
        """Return whether the engine made a step, or the workflows can go on without one.

        They can if the event loop is alive and none of them waits for the engine. So a slow tool counts as progress:
        the event loop ends its run after ``WorkflowSettings.timeout_s``. A run that blocks the loop for half of that is
        interrupted if it runs Python code; if it does not end then, the lease expires.
        """
        alive, self._loop_turned = self._loop_turned, False
        if alive:
            self._turned_s = time.monotonic()
        elif time.monotonic() - self._turned_s > self._settings.timeout_s / 2:
            thread = ctypes.c_ulong(self._thread.ident or 0)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(_BlockedLoopError))
        self._loop.call_soon_threadsafe(self._note_turn)
        return generated or (alive and not self._requests and not self._running)

    def drop(self) -> None:
        self._drops += 1
        self._engine.abort()
        self._requests.clear()
        self._running.clear()
        for run in self._runs:
            self._loop.call_soon_threadsafe(run.cancel)
        self._runs.clear()

    def close(self) -> None:
        self.drop()
        self._closed = True
        asyncio.run_coroutine_threadsafe(_stop(self._loop, self._attempts.abandoned), self._loop)
        self._thread.join(_END_S + 1)
        if self._thread.is_alive():
            _log.warning("a workflow blocks the event loop or ignores its cancellation, and is left behind")
        else:
            self._loop.close()

    def _submit(self) -> None:
        """Submit the waiting requests to the engine. Skip those of dropped work; hand a refusal to its workflow."""
        while self._requests:
            request = self._requests.popleft()
            if request.drops != self._drops or request.answer.done():
                continue
            number = next(self._numbers)
            try:
                self._engine.submit([GenerationRequest(number, request.token_ids, request.sampling)])
            except EngineError as exc:
                if self._engine.version < 0:
                    raise  # the engine lost its weights: it has failed itself
                self._loop.call_soon_threadsafe(_refuse, request.answer, exc)
            else:
                self._running[number] = request

    def _collect(self) -> list[PendingGroup]:
        """Add the results of ended runs to their groups; return the groups that became complete or failed."""
        finished = []
        while self._results:
            run, index, result = self._results.popleft()
            if run not in self._runs:
                continue  # it was dropped, or has failed
            if isinstance(result, str):
                run.group.fail(result)
                self._loop.call_soon_threadsafe(run.cancel)
            else:
                run.group.add(index, result)
            if run.group.is_generated or run.group.is_scored:
                self._runs.remove(run)
                finished.append(run.group)
        return finished

    # -- in the event loop's thread -----------------------------------------------------------------------------

    def _run_loop(self) -> None:
        """Run the event loop until :meth:`close`. A workflow may stop it, or raise SystemExit in a task of its own."""
        while not self._closed:
            try:
                self._loop.run_forever()
            except BaseException as exc:  # noqa: BLE001 - users' code may raise anything; it is reported
                _log.warning("a task of a workflow raised %s in the event loop, which goes on", short_repr(exc))

    def _note_turn(self) -> None:
        self._loop_turned = True

    def _begin(self, run: _GroupRun) -> None:
        for index in range(run.group.size):
            task = asyncio.Task(self._make_sample(run, index), loop=self._loop)  # without a task factory of the user's
            task.add_done_callback(functools.partial(self._note_end, run, index))
            run.tasks.append(task)

    def _note_end(self, run: _GroupRun, index: int, task: asyncio.Task[Sequence[Trajectory] | str]) -> None:
        """Keep a sample's result, whatever ended its task: a workflow may cancel it before it has even begun."""
        if task.cancelled():
            result: Sequence[Trajectory] | str = "the run of the workflow was cancelled"
        else:
            error = task.exception()
            result = task.result() if error is None else f"the run of the workflow ended by {short_repr(error)}"
        self._results.append((run, index, result))

    async def _make_sample(self, run: _GroupRun, index: int) -> Sequence[Trajectory] | str:
        """Return the trajectories of a sample, or the reason of the last attempt's failure."""
        current_log.set(None if run.group.spans is None else run.group.spans.of_sample(index))
        async with self._slots:  # an evaluation may start one sample more than there is room for
            return await self._run_workflow(run)

    async def _run_workflow(self, run: _GroupRun) -> Sequence[Trajectory] | str:
        async def attempt() -> Sequence[Trajectory]:
            result = await self._workflow(run.client, run.group.prompt)
            return checked_sample(result, max_length=self._settings.max_length, vocabulary=self._settings.vocabulary)

        reason = ""
        for _ in range(self._settings.attempts):
            sample, reason = await self._attempts.run(attempt)
            if not reason:
                return sample  # type: ignore[no-any-return] # it has succeeded
            self.failed_runs += 1
        return reason

    async def _generate(self, token_ids: Ints, sampling: Sampling, *, drops: int) -> Response:
        await hold_if_abandoned()
        request, begin_unix_s = _Request(token_ids, sampling, self._loop.create_future(), drops), time.time()
        self._requests.append(request)
        response = await request.answer
        await hold_if_abandoned()
        if (log := current_log.get()) is not None:
            log.add_generation(response, begin_unix_s)
        return response


def _answer(answers: Sequence[tuple[asyncio.Future[Response], Response]]) -> None:
    for future, response in answers:
        if not future.done():  # else the workflow was cancelled, or has timed out
            future.set_result(response)


def _refuse(answer: asyncio.Future[Response], error: EngineError) -> None:
    if not answer.done():
        answer.set_exception(error)


async def _stop(loop: asyncio.AbstractEventLoop, abandoned: Collection[asyncio.Task[Any]]) -> None:
    """Cancel all other tasks, wait up to ``_END_S`` for those that are not ``abandoned``, and stop the loop.

    A task that is cancelled already is not cancelled again: it may be closing what it had opened.
    """
    others = asyncio.all_tasks() - {asyncio.current_task(), *abandoned}
    for task in others:
        if not task.cancelling():
            task.cancel()
    try:
        await asyncio.wait(others, timeout=_END_S) if others else None
    finally:  # a workflow that ends may cancel all tasks
        loop.call_soon(loop.stop)
