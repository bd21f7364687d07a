"""The reports of progress: what keeps a lease, and what does not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest

from hwrl.interfaces import Sampling, Trajectory
from hwrl.rollout import PendingGroup, PolicyClient, Prompt, PromptLease, Workflow, WorkflowGenerator, WorkflowSettings
from tests.support.scripted_rollout import CountingEngine, Desk, Lengths, Updater, rollouter_of, steps


@pytest.fixture
def tool() -> Iterator[threading.Event]:
    """An event that ends a tool; the end of the test ends it, too."""
    ended = threading.Event()
    yield ended
    ended.set()


def test_the_leases_with_progress_are_reported_in_the_engine_in_the_queue_and_at_the_reward() -> None:
    scored, desk, updater = threading.Event(), Desk([0, 8]), Updater()
    rollouter = rollouter_of(
        desk, updater=updater, partial=False, reward=lambda *_: float(scored.wait(100)), report_interval_s=0.0
    )
    steps(rollouter, 3)
    assert desk.renewed[-1] == [0, 8], "0 waits for its reward, 8 is in the engine"
    desk.numbers, updater.offered = [2], [7]
    rollouter.step()
    assert desk.renewed[-1] == [0, 8]
    updater.engine.version = -1  # after a transfer that failed
    updater.offered = []
    steps(rollouter, 2)
    assert rollouter.engine.pending() == 2 and desk.renewed[-1] == [0], "no token comes from an engine without weights"
    scored.set()


def test_progress_is_reported_about_once_a_second() -> None:
    desk = Desk([8])
    rollouter = rollouter_of(desk)
    steps(rollouter, 5)
    assert desk.renewed == [[8]]


def begin(workflow: Workflow) -> WorkflowGenerator:
    """Return a generator with one run of ``workflow``, under lease 100."""
    settings = WorkflowSettings(group_size=1, max_samples=1, max_length=12, vocabulary=100)
    generator = WorkflowGenerator(CountingEngine(), workflow, tokenizer=None, settings=settings)
    generator.start(PendingGroup(Lengths()[4], 1, PromptLease(100, 4, 0, 0)), Sampling(10))
    return generator


def wait_for_progress(generator: WorkflowGenerator) -> None:
    deadline_s = time.monotonic() + 200.0
    while not generator.has_progress(generated=False):
        assert time.monotonic() < deadline_s, "it never came"


def test_a_workflow_in_a_tool_has_progress_and_one_that_waits_for_the_engine_has_it_by_steps(
    tool: threading.Event,
) -> None:
    async def calls(client: PolicyClient, prompt: Prompt) -> Trajectory:
        await asyncio.to_thread(tool.wait)
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        return trajectory.finish(reward=1.0)

    generator = begin(calls)
    try:
        for _ in range(3):
            wait_for_progress(generator)
        assert [lease.lease_id for lease in generator.leases()] == [100]
        tool.set()
        while not generator.has_work():
            time.sleep(0.001)
        assert not generator.has_progress(generated=False)
        generator.step()
        assert generator.has_progress(generated=True) and not generator.has_progress(generated=False)
    finally:
        generator.close()


def test_a_workflow_that_blocks_the_event_loop_has_no_progress(tool: threading.Event) -> None:
    began = threading.Event()

    async def blocks(client: PolicyClient, prompt: Prompt) -> Trajectory:
        began.set()
        tool.wait()
        raise RuntimeError("it took long")

    generator = begin(blocks)
    try:
        assert began.wait(200)
        generator.has_progress(generated=False)  # forgets the turns before
        assert not generator.has_progress(generated=False)
        tool.set()
        wait_for_progress(generator)
    finally:
        generator.close()
