"""Calls in threads: some hang, and delay nobody."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hwrl.interfaces import Sampling, Trajectory
from hwrl.rollout import PendingGroup, PolicyClient, Prompt, Workflow, WorkflowGenerator, WorkflowSettings
from hwrl.rollout.attempts import Attempts
from hwrl.rollout.call_threads import Caller, CallThreads, current_caller
from hwrl_workflows.environments import call_maybe_async
from tests.support.scripted_rollout import CountingEngine, Lengths
from tests.support.speed import slow
from tests.support.workflow_runs import single_turn

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


@pytest.fixture
def tool() -> Iterator[threading.Event]:
    """An event that ends a tool; the end of the test ends it, too."""
    ended = threading.Event()
    yield ended
    ended.set()


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


class Hanging:
    """A call that ends with ``tool``. ``began`` counts the calls that began."""

    def __init__(self, tool: threading.Event) -> None:
        self._tool, self.began = tool, threading.Semaphore(0)

    def __call__(self) -> bool:
        self.began.release()
        return self._tool.wait()


def run(workflow: Workflow, **limits: Any) -> Any:
    settings = WorkflowSettings(group_size=1, max_samples=1, max_length=12, vocabulary=100, **limits)
    generator = WorkflowGenerator(CountingEngine(), workflow, tokenizer=None, settings=settings)
    try:
        group = PendingGroup(Lengths()[2], 1)
        generator.start(group, Sampling(10))
        while generator.pending():
            generator.step()
            time.sleep(0.001)
        return group
    finally:
        generator.close()


def test_tools_that_hang_leave_the_threads_to_others(tool: threading.Event) -> None:
    found: list[str] = []

    async def calls_tools(client: PolicyClient, prompt: Prompt) -> Trajectory:
        for _ in range(3):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.01):
                    await call_maybe_async(tool.wait)
        WHERE.set("in the workflow")
        found.append(await call_maybe_async(WHERE.get))
        return await single_turn(client, prompt)

    assert run(calls_tools, timeout_s=100.0, attempts=1).is_generated
    assert found == ["in the workflow"]


def test_a_tool_that_hangs_at_the_end_of_an_abandoned_run_leaves_the_threads_to_others(tool: threading.Event) -> None:
    calls: list[int] = []

    async def hangs_at_its_end(client: PolicyClient, prompt: Prompt) -> Trajectory:
        calls.append(1)
        if len(calls) == 1:
            try:
                await asyncio.Event().wait()
            finally:
                await call_maybe_async(tool.wait)
        await call_maybe_async(len, calls)
        return await single_turn(client, prompt)

    assert run(hangs_at_its_end, timeout_s=slow(1.0), cancel_s=slow(0.1)).is_generated


def test_no_more_calls_run_at_once_than_there_are_places(tool: threading.Event) -> None:
    threads, hanging = CallThreads(2, "places"), Hanging(tool)
    first, second, third, fourth = (threads.submit(hanging) for _ in range(4))
    assert hanging.began.acquire(timeout=200) and hanging.began.acquire(timeout=200)
    assert threads_of("places") == 2
    assert fourth.cancel() and threads_of("places") == 2
    assert first.cancel() and threads_of("places") == 3, "a call that nobody waits for has no place"
    tool.set()
    assert second.result(200) and third.result(200)


class Connections(threading.local):
    """A connection for each thread; ``made`` gets an entry for each."""

    def __init__(self, made: list[int]) -> None:
        made.append(1)

    def use(self) -> None: ...


def test_calls_find_the_thread_local_state_of_earlier_calls() -> None:
    made: list[int] = []
    threads, connections = CallThreads(4, "keeps"), Connections(made)
    made.clear()  # this thread's own
    for _ in range(50):
        threads.submit(lambda: connections.use()).result(200)
    assert len(made) == 1, "one thread is enough for calls one after another"
    for call in [threads.submit(lambda: connections.use()) for _ in range(50)]:
        call.result(200)
    assert len(made) <= 4
    worker = threads.submit(threading.current_thread).result(200)
    threads.shutdown()
    worker.join(200)
    assert not worker.is_alive(), "idle threads end with the executor"


def test_a_thread_that_was_given_up_takes_no_further_call(tool: threading.Event) -> None:
    threads, hanging = CallThreads(1, "given up"), Hanging(tool)
    given_up = threads.submit(threading.current_thread).result(200)
    call = threads.submit(hanging)
    assert hanging.began.acquire(timeout=200) and call.cancel()
    assert threads.submit(threading.current_thread).result(200) is not given_up
    tool.set()
    given_up.join(200)
    assert not given_up.is_alive() and threads.submit(len, "ab").result(200) == 2


def test_the_calls_of_an_abandoned_caller_take_no_places(tool: threading.Event) -> None:
    threads, caller, context = CallThreads(1, "abandoned"), Caller(), contextvars.copy_context()
    context.run(current_caller.set, caller)
    hanging = Hanging(tool)
    running, queued, cancelled = (context.run(threads.submit, hanging) for _ in range(3))
    assert hanging.began.acquire(timeout=200)
    assert threads_of("abandoned") == 1 and cancelled.cancel()
    threads.abandon(caller)
    later = context.run(threads.submit, tool.wait)
    assert threads_of("abandoned") == 3
    assert threads.submit(len, "ab").result(200) == 2
    other, waits = threads.submit(tool.wait), threads.submit(tool.wait)
    assert threads_of("abandoned") == 4, "all others have the one place"
    tool.set()
    assert all(call.result(200) for call in (running, queued, later, other, waits))


def test_abandoned_runs_do_not_let_more_calls_run_at_once(tool: threading.Event) -> None:
    threads = CallThreads(1, "hung runs")

    async def abandon_two_runs() -> None:
        attempts, end = Attempts(timeout_s=0.01, cancel_s=0.01, threads=threads), asyncio.Event()

        async def ignores_its_cancellation() -> None:
            try:
                await end.wait()
            finally:
                await end.wait()

        await asyncio.gather(*(attempts.run(ignores_its_cancellation) for _ in range(2)))
        assert len(attempts.abandoned) == 2
        calls = [threads.submit(tool.wait) for _ in range(3)]
        assert threads_of("hung runs") == 1
        tool.set()
        assert all(call.result(200) for call in calls)
        end.set()
        await asyncio.wait(set(attempts.abandoned))

    asyncio.run(abandon_two_runs())


def test_an_error_is_the_callers_and_after_the_end_no_call_begins(tool: threading.Event) -> None:
    threads = CallThreads(1, "ended")
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(200)
    hanging = Hanging(tool)
    running, queued = threads.submit(hanging), threads.submit(hanging)
    assert hanging.began.acquire(timeout=200)
    threads.shutdown()
    tool.set()
    assert running.result(200) and not queued.done()


def test_a_process_ends_while_a_call_hangs() -> None:
    code = """
import asyncio, threading
from hwrl.rollout.call_threads import CallThreads
async def hang():
    asyncio.get_running_loop().set_default_executor(CallThreads(1, "hangs"))
    began = threading.Event()
    call = asyncio.ensure_future(asyncio.to_thread(lambda: began.set() or threading.Event().wait()))
    await asyncio.sleep(0)
    began.wait()
    call.cancel()
asyncio.run(hang())
"""
    assert subprocess.run([sys.executable, "-c", code], timeout=600, check=False).returncode == 0
