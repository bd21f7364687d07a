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
from hwrl.rollout import PolicyClient, Prompt, Workflow, WorkflowGenerator, WorkflowSettings, single_turn
from hwrl.rollout.call_threads import CallThreads
from hwrl.rollout.environments import call_maybe_async
from tests.support.scripted_rollout import CountingEngine, Lengths

WHERE: contextvars.ContextVar[str] = contextvars.ContextVar("where", default="nowhere")


@pytest.fixture
def tool() -> Iterator[threading.Event]:
    """An event that ends a tool; the end of the test ends it, too."""
    ended = threading.Event()
    yield ended
    ended.set()


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def run(workflow: Workflow, **limits: Any) -> Any:
    settings = WorkflowSettings(group_size=1, max_samples=1, max_length=12, vocabulary=100, **limits)
    generator = WorkflowGenerator(CountingEngine(), workflow, tokenizer=None, settings=settings)
    try:
        group = generator.start(Lengths()[2], Sampling(10), size=1)
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

    assert run(calls_tools, timeout_s=10.0, attempts=1).is_generated
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

    assert run(hangs_at_its_end, timeout_s=1.0, cancel_s=0.1).is_generated


def test_no_more_calls_run_at_once_than_there_are_places(tool: threading.Event) -> None:
    threads = CallThreads(2, "places")
    first, second, third, fourth = (threads.submit(tool.wait) for _ in range(4))
    assert threads_of("places") == 2
    assert fourth.cancel() and threads_of("places") == 2
    assert first.cancel() and threads_of("places") == 3, "a call that nobody waits for has no place"
    tool.set()
    assert second.result(20) and third.result(20)


def test_an_error_is_the_callers_and_after_the_end_no_call_begins(tool: threading.Event) -> None:
    threads = CallThreads(1, "ended")
    with pytest.raises(SystemExit):
        threads.submit(sys.exit, 3).result(20)
    running, queued = threads.submit(tool.wait), threads.submit(tool.wait)
    threads.shutdown()
    tool.set()
    assert running.result(20) and not queued.done()


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
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
