"""Runs of a workflow that raise or break whatever there is: each ends with a result, and the others go on."""

from __future__ import annotations

import asyncio
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from hwrl.rollout import PolicyClient, Prompt, Workflow
from tests.support.workflow_runs import generator_of, single_turn, start, step_until, wait_until


async def cancels_itself(client: PolicyClient, prompt: Prompt) -> Any:
    task = asyncio.ensure_future(asyncio.sleep(1e6))
    task.cancel()
    await task


async def ends_the_process(client: PolicyClient, prompt: Prompt) -> Any:
    raise SystemExit(3)


class GivenUp(BaseException):
    """As some libraries for time limits have it: not an Exception."""


async def gives_up(client: PolicyClient, prompt: Prompt) -> Any:
    raise GivenUp


class UnreadableError(Exception):
    """An error that cannot be shown."""

    def __repr__(self) -> str:
        raise AttributeError("it has no code")


async def cancels_all(client: PolicyClient, prompt: Prompt) -> Any:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(0)


async def stops_the_loop(client: PolicyClient, prompt: Prompt) -> Any:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)


async def ends_the_loop_by_a_task_of_its_own(client: PolicyClient, prompt: Prompt) -> Any:
    async def leaves() -> None:
        sys.exit(3)

    await asyncio.create_task(leaves())


class ShownBy:
    """Its repr, or that of the error's argument, does something else."""

    def __init__(self, act: Callable[[], str]) -> None:
        self._act = act

    def __repr__(self) -> str:
        return self._act()

    __str__ = __repr__


class OddText(str):
    def __len__(self) -> int:
        raise KeyboardInterrupt

    def __getitem__(self, key: Any) -> str:
        raise KeyboardInterrupt


class UnequalError(Exception):
    def __eq__(self, other: object) -> bool:
        raise SystemExit

    __hash__ = Exception.__hash__


def recurse() -> str:
    return recurse()


def leave() -> str:
    raise SystemExit


RAISED = [
    SystemExit(3),
    KeyboardInterrupt(),
    GeneratorExit(),
    asyncio.CancelledError(),
    StopIteration(),
    StopAsyncIteration(),
    MemoryError(),
    GivenUp(),
    UnreadableError(),
    UnequalError(),
    BaseExceptionGroup("two", [GeneratorExit(), SystemExit()]),
    *(Exception(ShownBy(act)) for act in (recurse, leave, lambda: OddText("odd"))),
]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_run_fails_whatever_it_raises(error: BaseException) -> None:
    async def raises(client: PolicyClient, prompt: Prompt) -> Any:
        raise error

    with generator_of(raises, timeout_s=600.0) as generator:
        group = start(generator, size=2)
        assert step_until(generator, lambda: not generator.pending()) == [group]
        assert "raised" in str(group.result().failure) and generator.failed_runs >= 2


def test_two_responses_to_the_same_tokens_are_no_trajectory() -> None:
    async def generates_twice_at_once(client: PolicyClient, prompt: Prompt) -> Any:
        trajectory = client.begin(prompt.token_ids)
        await asyncio.gather(trajectory.generate(), trajectory.generate())
        return trajectory.finish()

    with generator_of(generates_twice_at_once, attempts=1, timeout_s=20.0) as generator:
        group = start(generator)
        step_until(generator, lambda: not generator.pending())
        assert "changed while the policy continued it" in str(group.result().failure)


def test_a_run_that_never_returns_control_fails() -> None:
    async def spins(client: PolicyClient, prompt: Prompt) -> Any:
        while True:
            pass

    with generator_of(spins, attempts=1, timeout_s=0.2) as generator:
        group = start(generator)
        wait_until(lambda: generator.has_progress(generated=False) and not generator.pending(), generator.step)
        assert "held the event loop" in str(group.result().failure)


async def sets_a_task_factory(client: PolicyClient, prompt: Prompt) -> Any:
    def fails(*args: object, **options: object) -> Any:
        raise RuntimeError("no tasks here")

    asyncio.get_running_loop().set_task_factory(fails)
    raise RuntimeError("afterwards, nothing of the user's can begin a task")


@pytest.mark.parametrize(
    "workflow", [sets_a_task_factory, cancels_itself, cancels_all, stops_the_loop, ends_the_loop_by_a_task_of_its_own]
)
def test_a_run_that_breaks_its_event_loop_fails_and_the_loop_goes_on(workflow: Workflow) -> None:
    runs = [workflow]

    async def first_breaks_it(client: PolicyClient, prompt: Prompt) -> Any:
        return await (runs.pop() if runs else single_turn)(client, prompt)

    with generator_of(first_breaks_it, attempts=1, timeout_s=600.0) as generator:
        groups = [start(generator, size=2), start(generator)]  # one place: most of the tasks wait, or have not begun
        assert len(step_until(generator, lambda: not generator.pending())) == 2
        assert groups[0].result().failure
        group = start(generator)
        step_until(generator, lambda: not generator.pending())
        assert group.is_generated, "the loop goes on"


def test_a_run_that_was_left_behind_is_never_thrown_an_error_by_the_garbage_collector() -> None:
    """It may catch that, too: the thread in which the collector runs would never return from it."""
    thrown: list[BaseException] = []

    async def ignores_all(client: PolicyClient, prompt: Prompt) -> Any:
        while not any(isinstance(one, GeneratorExit) for one in thrown):
            try:
                await asyncio.sleep(1e6)
            except BaseException as error:  # noqa: BLE001 - as a user's code may do
                thrown.append(error)

    def leave_one_behind() -> None:
        with generator_of(ignores_all, attempts=1, timeout_s=0.2) as generator:
            start(generator)
            step_until(generator, lambda: not generator.pending())

    leave_one_behind()
    gc.collect()
    assert thrown and not any(isinstance(one, GeneratorExit) for one in thrown)
