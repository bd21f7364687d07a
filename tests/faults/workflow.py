"""A workflow of two turns with a tool between them; the phase ``calling`` is the call of the tool."""

from __future__ import annotations

import asyncio
from typing import Any

from hwrl.interfaces import Trajectory
from hwrl.rollout import PolicyClient, Prompt, Workflow
from tests.faults.phases import pass_gate


def factory(*, tokenizer: Any) -> Workflow:
    async def talk(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        await asyncio.to_thread(pass_gate, "calling")
        trajectory.add(tokenizer("0>", add_special_tokens=False)["input_ids"])
        await trajectory.generate()
        return trajectory.finish(metrics={"turns": 2.0})

    return talk
