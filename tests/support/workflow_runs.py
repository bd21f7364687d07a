"""A generator of a workflow on a scripted engine, and ways to wait for its groups."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from hwrl.interfaces import Sampling, Trajectory
from hwrl.rollout import PendingGroup, PolicyClient, Prompt, Workflow, WorkflowGenerator, WorkflowSettings
from tests.support.scripted_rollout import CountingEngine, Lengths
from tests.support.speed import slow


async def single_turn(client: PolicyClient, prompt: Prompt) -> Trajectory:
    """Return a trajectory of one response, as a run without a workflow does."""
    trajectory = client.begin(prompt.token_ids)
    await trajectory.generate()
    return trajectory.finish()


@contextlib.contextmanager
def generator_of(workflow: Workflow, **settings: Any) -> Iterator[WorkflowGenerator]:
    chosen: Any = {"max_samples": 1, "timeout_s": slow(1.0), "cancel_s": slow(0.1), **settings}
    generator = WorkflowGenerator(
        CountingEngine(),
        workflow,
        tokenizer=None,
        settings=WorkflowSettings(group_size=1, max_length=12, vocabulary=100, **chosen),
    )
    try:
        yield generator
    finally:
        generator.close()


def wait_until(condition: Callable[[], bool], do: Callable[[], object] = lambda: None) -> None:
    deadline_s = time.monotonic() + 200.0
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        do()
        time.sleep(0.001)


def step_until(generator: WorkflowGenerator, condition: Callable[[], bool]) -> list[Any]:
    finished: list[Any] = []
    wait_until(condition, lambda: finished.extend(generator.step()))
    return finished


def start(generator: WorkflowGenerator, size: int = 1) -> Any:
    group = PendingGroup(Lengths()[2], size)
    generator.start(group, Sampling(10))
    return group
