"""The served ledger: requests that wait, and requests from dead replicas."""

from __future__ import annotations

import asyncio

import numpy as np

from hwrl.interfaces import PromptGroup, Response
from hwrl.rollout import PromptLease
from hwrl.run.config import Config, parse_config
from hwrl.run.processes.actors import LedgerActor


def config_of() -> Config:
    return parse_config(
        {
            "dir": "run",
            "model": {"path": "model"},
            "data": {"train": "train.jsonl"},
            "reward": {"function": "m:f", "timeout_s": 0.1},
            "rollout": {"n": 2, "group_timeout_s": 0.2},
            "train": {"steps": 3, "batch_groups": 2},
            "async_training": {"staleness_threshold": 0},
        }
    )


def finished(lease: PromptLease) -> PromptGroup:
    tokens = np.array([lease.version], dtype=np.int32)
    return PromptGroup.join(
        [Response(tokens, tokens.astype(np.float32), tokens, truncated=False)] * 2,
        sequence_number=lease.sequence_number,
        lease_id=lease.lease_id,
        incarnation=lease.incarnation,
        prompt_ids=np.array([1], dtype=np.int32),
        rewards=[0.0, 1.0],
        metrics={},
    )


async def begin(actor: LedgerActor) -> asyncio.Task[object]:
    """Request the first batch, and let the request reach the ledger."""
    request: asyncio.Task[object] = asyncio.create_task(actor.take(2, 0))
    await asyncio.sleep(0)
    return request


def test_prompts_of_a_forgotten_replica_go_to_others() -> None:
    async def scene() -> None:
        actor = LedgerActor(config_of())
        await begin(actor)
        held = await actor.lease(2, "a#0")
        waiting = asyncio.create_task(actor.lease(2, "a#0"))  # its next request, still open when it dies
        await asyncio.sleep(0)
        assert await actor.forget("a#0") == 2
        assert await waiting == []
        again = await actor.lease(2, "a#1")
        assert [lease.sequence_number for lease in again] == [lease.sequence_number for lease in held]
        await actor.complete([finished(lease) for lease in held], "a#0", {})
        assert (await actor.state_dict())["owed"] == [0, 1]

    asyncio.run(scene())


def test_an_abandoned_take_takes_nothing() -> None:
    async def scene() -> None:
        actor = LedgerActor(config_of())
        abandoned = await begin(actor)
        leases = await actor.lease(2, "a#0")
        await actor.abandon_take()
        assert await abandoned == ([], None)
        await actor.complete([finished(lease) for lease in leases], "a#0", {})
        groups, taken = await actor.take(2, 0)
        assert taken is not None and taken.sequence_numbers == [group.sequence_number for group in groups] == [0, 1]

    asyncio.run(scene())


def test_a_resume_ends_a_take_that_waits_for_the_lost_timeline() -> None:
    async def scene() -> None:
        actor = LedgerActor(config_of())
        abandoned = await begin(actor)
        await actor.load_state_dict({"version": 1, "trained": 2, "next": 2, "owed": []}, 1)
        assert await abandoned == ([], None)

    asyncio.run(scene())


def test_replicas_that_hold_a_prompt_too_long_are_named_and_lose_it() -> None:
    async def scene() -> None:
        actor = LedgerActor(config_of())
        await begin(actor)
        await actor.lease(1, "a#0")
        await asyncio.sleep(0.22)  # the deadline itself, not a wait for something
        assert await actor.expire_overdue() == ["a#0"]
        assert [lease.sequence_number for lease in await actor.lease(2, "b#1")] == [0, 1]

    asyncio.run(scene())
