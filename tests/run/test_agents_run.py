"""A run that trains on an agent with a base_url, and a signal that ends it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import Run, assert_interrupted

WORKFLOW = '''
import asyncio, json, urllib.request
from dataclasses import replace

from hwrl_agents import serve

def agent(base_url, api_key, prompt, answer):
    """Ask again, after what was said, if the answer is wrong."""
    for _ in range(2):
        headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
        body = json.dumps({"model": "policy", "prompt": prompt}).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/completions", body, headers)) as reply:
            said = json.load(reply)["choices"][0]["text"]
        if said == answer:
            return 1.0
        prompt += said + ">"
    return 0.0

def factory(*, tokenizer):
    async def workflow(client, prompt):
        async with serve(client) as endpoint:
            score = await asyncio.to_thread(agent, endpoint.base_url, endpoint.api_key, prompt.text, prompt.answer)
            rows = endpoint.trajectories()
            assert len(rows) == 1, "the second request did not continue the first"
            return [replace(row, reward=score + len(said) / 100) for row in rows for said in [row.response_ids]]
    return workflow
'''


@pytest.mark.long(40)
def test_a_run_trains_on_what_an_agent_made_of_its_endpoint_until_a_signal_ends_it_cleanly(
    demo: Path, start: Callable[..., Run], tmp_path: Path
) -> None:
    (tmp_path / "agent.py").write_text(WORKFLOW)
    workflow = f"rollout.workflow={tmp_path / 'agent.py'}:factory"
    run = start(
        *(workflow, "rollout.max_model_len=24", "train.steps=2000", "data.eval=null", "eval.every_steps=0"),
        "checkpoint.save_every_steps=0",
    )
    run.wait_for_step(4)
    in_its_group = [pid for pid in run.processes("") if os.getpgid(pid) == run.process.pid]
    assert in_its_group == [run.process.pid], "Ray would end before a slow step does"
    run.terminate_group()
    assert_interrupted(run)
    assert all(row["reward/mean"] > 0 for row in run.metrics())
