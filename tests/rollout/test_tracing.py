"""The spans of traced prompts: single turns, workflows with tools, and prompts that are not traced."""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hwrl.interfaces import PromptGroup, Sampling, Span, Trajectory
from hwrl.rollout import PendingGroup, PolicyClient, Prompt, Workflow, WorkflowGenerator, WorkflowSettings, traced
from hwrl.rollout.tracing import SpanLog
from hwrl_agents import serve
from tests.support.agents import ask
from tests.support.chat_models import STYLES
from tests.support.scripted_rollout import CountingEngine, Desk, Lengths, rollouter_of, step_until

PAGE = Path(__file__).parents[2] / "docs" / "watching.md"


def roll_out(numbers: list[int], *, trace_every: int) -> list[PromptGroup]:
    desk = Desk(list(numbers))
    rollouter = rollouter_of(desk, trace_every=trace_every)
    step_until(rollouter, lambda: len(desk.groups) == len(numbers))
    return sorted(desk.groups, key=lambda group: group.sequence_number)


def test_a_traced_prompt_tells_its_lease_each_generation_and_its_reward() -> None:
    began_s = time.time()
    (group,) = roll_out([3], trace_every=1)
    lease, *generations, reward = group.spans
    assert (lease.name, lease.attributes) == ("lease", {"replica": "replica-0", "version": 0})
    assert [span.name for span in generations] == ["generate"] * 2 and reward.name == "reward"
    assert [span.attributes for span in generations] == [
        {"tokens": 4, "truncated": False, "version_min": 0, "version_max": 0, "sample": sample} for sample in (0, 1)
    ]
    assert reward.attributes == {"mean": 1.0}
    assert began_s <= lease.begin_unix_s <= lease.end_unix_s <= generations[0].begin_unix_s
    assert max(span.end_unix_s for span in generations) <= reward.begin_unix_s <= reward.end_unix_s <= time.time()


@pytest.mark.parametrize(("every", "traced_numbers"), [(0, []), (1, [0, 1, 2, 3]), (3, [0, 3])])
def test_every_nth_prompt_is_traced(every: int, traced_numbers: list[int]) -> None:
    groups = roll_out([0, 1, 2, 3], trace_every=every)
    assert [group.sequence_number for group in groups if group.spans] == traced_numbers


async def with_a_tool(client: PolicyClient, prompt: Prompt) -> Trajectory:
    trajectory = client.begin(prompt.token_ids)
    await trajectory.generate()
    with traced("tool", tool="clock") as attributes:
        await asyncio.sleep(0)
        attributes["failed"] = False
    trajectory.add([7, 8])
    await trajectory.generate()
    return trajectory.finish(reward=1.0)


async def over_http(client: PolicyClient, prompt: Prompt) -> list[Trajectory]:
    async with serve(client) as endpoint:
        answer = await ask(endpoint, "completions", {"model": "policy", "prompt": prompt.token_ids.tolist()})
        assert answer.status == 200, answer.body
        return endpoint.trajectories()


def run_each(workflow: Workflow, logs: Sequence[SpanLog | None]) -> None:
    """Run a group of two samples with each of ``logs``, one after the other, in one replica."""
    settings = WorkflowSettings(group_size=2, max_samples=8, max_length=12, vocabulary=100)
    tokenizer = STYLES["chatml"].tokenizer()
    generator = WorkflowGenerator(CountingEngine(), workflow, tokenizer=tokenizer, settings=settings)
    deadline_s = time.monotonic() + 600.0
    try:
        for log in logs:
            group = PendingGroup(Lengths()[1], 2, spans=log)
            generator.start(group, Sampling(10))
            while generator.pending():
                assert time.monotonic() < deadline_s, "it never ended"
                generator.step()
            assert group.is_generated, "a run failed"
    finally:
        generator.close()


def spans_of(log: SpanLog | None) -> tuple[Span, ...]:
    """Return the spans of a group of two runs of a workflow with a tool, generated with ``log``."""
    run_each(with_a_tool, [log])
    return () if log is None else log.spans()


def test_the_tool_of_the_page_is_in_the_trace() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "watching.md", "exec"), names)

    async def looks_up(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        assert [await names["look_up"](word, {"a": "1"}) for word in "ab"] == ["1", ""]
        await trajectory.generate()
        return trajectory.finish(reward=1.0)

    log = SpanLog()
    run_each(looks_up, [log, None])
    tools = [span.attributes for span in log.spans() if span.name == "tool"]
    assert sorted((tool["sample"], tool["failed"]) for tool in tools) == [(0, False), (0, True), (1, False), (1, True)]
    assert {tool["tool"] for tool in tools} == {"look_up"}


def test_a_call_of_an_endpoint_is_in_the_trace_of_its_own_sample() -> None:
    first, second = SpanLog(), SpanLog()
    run_each(over_http, [None, first, None, second])
    for log in (first, second):
        assert sorted((span.name, span.attributes["sample"]) for span in log.spans()) == [
            ("generate", 0),
            ("generate", 1),
        ]


def test_a_workflow_tells_every_call_with_its_sample() -> None:
    spans = spans_of(SpanLog())
    assert Counter((span.name, span.attributes["sample"]) for span in spans) == {
        ("generate", 0): 2,
        ("generate", 1): 2,
        ("tool", 0): 1,
        ("tool", 1): 1,
    }
    assert all(span.attributes == {"tool": "clock", "failed": False, "sample": span.attributes["sample"]}
               for span in spans if span.name == "tool")  # fmt: skip
    assert all(span.begin_unix_s <= span.end_unix_s for span in spans)


def test_a_workflow_whose_prompt_is_not_traced_runs_as_ever() -> None:
    assert spans_of(None) == ()


def test_a_block_that_raises_is_a_span_and_one_outside_of_a_workflow_is_none() -> None:
    with pytest.raises(ZeroDivisionError), traced("tool"):
        _ = 1 / 0
    log = SpanLog(replica="a")
    log.of_sample(3).add("tool", {"tool": "x"}, begin_unix_s=log.began_unix_s)
    (span,) = log.spans()
    assert span.attributes == {"replica": "a", "sample": 3, "tool": "x"}
