"""Workflows with agents that know a base_url only, on an engine whose weights change; and the engine's own record."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.interfaces import Completion, GenerationRequest, Response, RolloutEngine, Sampling, Trajectory
from hwrl.rollout import ChatTokens, PendingGroup, PolicyClient, Prompt, Workflow, WorkflowGenerator, WorkflowSettings
from hwrl_agents import serve
from tests.support.agents import call

PAGE = Path(__file__).parents[2] / "docs" / "agents.md"


class Witness:
    """Keeps each request to ``engine`` with its response."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.requests: dict[int, GenerationRequest] = {}
        self.responses: dict[int, Response] = {}
        self._submit, self._step = engine.submit, engine.step
        vars(engine).update(submit=self.submit, step=self.step)

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._submit(requests)
        self.requests |= {one.request_id: one for one in requests}

    def step(self) -> list[Completion]:
        done = self._step()
        self.responses |= {one.request_id: one.response for one in done}
        return done


def standard_library_agent(base_url: str, api_key: str, question: str) -> None:
    """Take three turns, one of them as a stream; repeat what it has read."""
    messages = [{"role": "user", "content": question}]
    for turn in range(3):
        body = {"messages": messages, "stream": turn == 1}
        answer = call(f"{base_url}/chat/completions", body, token=api_key).body
        deltas = [event["choices"][0]["delta"] for event in answer] if turn == 1 else [answer["choices"][0]["message"]]
        text = "".join(delta.get("content", "") for delta in deltas)
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]


def standard_library_workflow() -> Workflow:
    async def workflow(client: PolicyClient, prompt: Prompt) -> Sequence[Trajectory]:
        async with serve(client) as endpoint:
            await asyncio.to_thread(standard_library_agent, endpoint.base_url, endpoint.api_key, prompt.text)
            return endpoint.trajectories()

    return workflow


def workflow_of_the_page() -> Workflow:
    """Return the workflow of docs/agents.md, as printed; its agent takes two turns."""
    pytest.importorskip("openai", reason="the page's agent uses the openai package")
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(block.splitlines()) <= 30
    names: dict[str, Any] = {}
    exec(compile(block, str(PAGE), "exec"), names)
    workflow: Workflow = names["factory"](tokenizer=None)
    return workflow


def train_agents(
    engine: RolloutEngine,
    workflow: Workflow,
    *,
    tokenizer: Any,
    end_ids: Sequence[int],
    update: Callable[[], None],
    steps_per_update: int,
    samples: int = 4,
) -> list[Trajectory]:
    """Run ``workflow`` for one prompt, and ``update`` the weights every few steps of the engine."""
    settings = WorkflowSettings(
        group_size=samples,
        max_samples=samples,
        max_length=400,
        vocabulary=len(tokenizer),
        attempts=1,
        end_ids=end_ids,
    )
    generator = WorkflowGenerator(engine, workflow, tokenizer=tokenizer, settings=settings)
    try:
        group = PendingGroup(Prompt("2 + 2?", np.array([1], np.int32), "4"), samples)
        generator.start(group, Sampling(40))
        deadline_s, steps = time.monotonic() + 2800.0, 0
        while generator.pending():
            assert time.monotonic() < deadline_s, "the agents never end"
            if not generator.has_work():
                time.sleep(0.001)  # the agents' turn
                continue
            generator.step()
            steps += 1
            if steps % steps_per_update == 0:
                update()
        assert group.is_generated, group.result()
        return group.trajectories
    finally:
        generator.close()


def check_tokens(rows: Sequence[Trajectory], witness: Witness, *, turns: int, chat: ChatTokens) -> None:
    """Check that ``rows`` have the engine's tokens, log-probabilities and versions, bit for bit, over three updates."""
    left = dict(witness.responses)
    assert len(left) == len(rows) * turns
    for row in rows:
        assert [part.by_policy for part in row.segments] == [False, True] * turns
        for index in range(1, 2 * turns, 2):
            number = next(number for number, response in left.items() if _same_bits(row.segments[index], response))
            del left[number]
            context = np.concatenate([part.token_ids for part in row.segments[:index]])
            assert context.tolist() == witness.requests[number].prompt_ids.tolist()
    said = witness.responses.values()
    assert max(len(set(response.versions.tolist())) for response in said) > 3, "no answer met three updates"
    again = [chat.encode(chat.text(response)).tolist() == response.token_ids.tolist() for response in said]
    assert not all(again), "encoding the text again would have been as good"


def _same_bits(one: Any, other: Response) -> bool:
    columns = ("token_ids", "logprobs", "versions")
    return all(getattr(one, name).tobytes() == getattr(other, name).tobytes() for name in columns)
