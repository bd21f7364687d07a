"""Runs of a workflow that ignore their cancellation: they are abandoned, and hold nobody."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import pytest

from hwrl.interfaces import Response, Trajectory
from hwrl.rollout import PolicyClient, Prompt
from tests.support.speed import slow
from tests.support.workflow_runs import generator_of, single_turn, start, step_until, wait_until


class Stuck:
    """Its first run does not end at its cancellation, but after :meth:`release`; the later runs are single turns."""

    def __init__(self, *, finally_hangs: bool = False) -> None:
        self._finally_hangs = finally_hangs
        self._released, self._goes_on = asyncio.Event(), threading.Event()
        self._tasks: list[asyncio.Task[Any]] = []

    async def __call__(self, client: PolicyClient, prompt: Prompt) -> Trajectory:
        if self._tasks:
            return await single_turn(client, prompt)
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        await (self.hang_in_finally() if self._finally_hangs else self.swallow())
        return await single_turn(client, prompt)

    async def swallow(self) -> None:
        while not self._released.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await self._released.wait()
        self._goes_on.set()

    async def hang_in_finally(self) -> None:
        try:
            await self._released.wait()
        finally:
            await self._released.wait()
            self._goes_on.set()

    def is_over(self) -> bool:
        return self._tasks[0].done()

    def release(self) -> None:
        """Let the first run go on, and wait until it waits again or has ended."""
        loop = self._tasks[0].get_loop()
        loop.call_soon_threadsafe(self._released.set)
        assert self._goes_on.wait(200)
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop).result()


@pytest.mark.parametrize("finally_hangs", [False, True])
def test_a_run_that_ignores_its_cancellation_fails_and_frees_its_place(finally_hangs: bool) -> None:
    stuck = Stuck(finally_hangs=finally_hangs)
    with generator_of(stuck, attempts=1) as generator:
        first, second = start(generator), start(generator)
        assert step_until(generator, lambda: not generator.pending()) == [first, second]
        assert "abandoned" in str(first.result().failure) and second.is_generated and not stuck.is_over()
        stuck.release()


def test_the_late_result_of_an_abandoned_run_is_not_used_and_it_generates_no_longer() -> None:
    stuck = Stuck()
    with generator_of(stuck) as generator:
        group = start(generator)
        assert step_until(generator, lambda: not generator.pending()) == [group]
        (row,) = group.trajectories
        assert row.response_ids.tolist() == [1, 2, 3] and generator.failed_runs == 1 and generator.tokens == 3
        stuck.release()
        assert not generator.has_work() and not stuck.is_over()


def test_an_abandoned_run_gets_no_answer_to_a_call_that_was_under_way() -> None:
    calls: list[asyncio.Task[Response]] = []

    async def generates_at_its_end(client: PolicyClient, prompt: Prompt) -> Trajectory:
        try:
            await asyncio.Event().wait()
        finally:
            calls.append(asyncio.create_task(client.generate(prompt.token_ids)))
            await asyncio.Event().wait()
        raise AssertionError

    with generator_of(generates_at_its_end, attempts=1) as generator:
        start(generator)
        wait_until(lambda: generator.failed_runs == 1)  # the engine makes no step meanwhile
        step_until(generator, lambda: generator.tokens > 0)
        for _ in range(3):
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), calls[0].get_loop()).result()
        assert not calls[0].done()


def test_an_abandoned_run_does_not_hold_the_end() -> None:
    stuck = Stuck()
    with generator_of(stuck, attempts=1) as generator:
        start(generator)
        step_until(generator, lambda: not generator.pending())
        begin_s = time.monotonic()
    assert time.monotonic() - begin_s < slow(4.0) and not stuck.is_over()


def test_a_result_after_the_limit_is_a_failure() -> None:
    async def returns_late(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return trajectory.finish(1.0)
        raise AssertionError

    with generator_of(returns_late, attempts=1, cancel_s=200.0) as generator:
        group = start(generator)
        step_until(generator, lambda: not generator.pending())
        assert group.result().failure == f"the workflow did not return within {slow(1):g} s"


def test_a_run_that_cancels_all_tasks_of_the_loop_ends_its_group() -> None:
    async def cancels_all(client: PolicyClient, prompt: Prompt) -> Trajectory:
        for task in asyncio.all_tasks():
            task.cancel()
        return await single_turn(client, prompt)

    with generator_of(cancels_all, attempts=1, timeout_s=200.0) as generator:
        group = start(generator)
        step_until(generator, lambda: not generator.pending())
        assert "cancelled" in str(group.result().failure)


@pytest.mark.parametrize("timeout_s", [600.0, 0.05])
def test_a_dropped_run_may_close_what_it_opened_at_the_end_of_the_replica(timeout_s: float) -> None:
    began, closing, closed = threading.Event(), threading.Event(), threading.Event()

    async def opens(client: PolicyClient, prompt: Prompt) -> Trajectory:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            closing.set()
            for _ in range(5000):
                await asyncio.sleep(0)
            closed.set()
        raise AssertionError

    with generator_of(opens, timeout_s=timeout_s, cancel_s=200.0) as generator:
        start(generator)
        assert began.wait(200)
        assert timeout_s == 600.0 or closing.wait(200), "the limit did not end it"
        generator.drop()
        assert closing.wait(200)
    assert closed.is_set()
