"""The served ledger: requests that wait, and requests from dead replicas."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from hwrl.errors import DataError, EngineError
from hwrl.interfaces import PromptGroup, Response
from hwrl.rollout import PromptLease, UntrainedPrompts
from hwrl.run.ledger import EMPTY_LEDGER, BatchInfo, LedgerActor
from tests.support.run_config import config_of
from tests.support.single_turns import join_responses


def ledger(*, filtered_in_a_row: int | None = None, on_failure: str = "stop") -> LedgerActor:
    algorithm = {"filter_groups": True, "max_filtered_in_a_row": filtered_in_a_row} if filtered_in_a_row else {}
    config = config_of(
        algorithm=algorithm,
        rollout={"n": 2, "on_failure": on_failure, "max_attempts": 1, "group_timeout_s": 10},
        train={"steps": 3, "batch_groups": 2},
        async_training={"staleness_threshold": 0},
    )
    return LedgerActor(config)


def finished(lease: PromptLease) -> PromptGroup:
    tokens = np.array([lease.version], dtype=np.int32)
    return join_responses(
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
    request: asyncio.Task[object] = asyncio.create_task(actor.advance_and_take(2, 0))
    await asyncio.sleep(0)
    return request


def test_prompts_of_a_forgotten_replica_go_to_others() -> None:
    async def scene() -> None:
        actor = ledger()
        batch = await begin(actor)
        held = await actor.lease(2, "a#0")
        waiting = asyncio.create_task(actor.lease(2, "a#0"))  # its next request, still open when it dies
        await asyncio.sleep(0)
        assert await actor.forget("a#0") == (2, False, 0)
        assert await waiting == []
        again = await actor.lease(2, "a#1")
        assert [lease.sequence_number for lease in again] == [lease.sequence_number for lease in held]
        await actor.complete([finished(lease) for lease in held], "a#0", {})
        assert not batch.done(), "what a forgotten replica finishes counts for nothing"
        await actor.complete([finished(lease) for lease in again], "a#1", {})
        groups, _ = cast(Any, await batch)
        assert [group.lease_id for group in groups] == [lease.lease_id for lease in again]

    asyncio.run(scene())


def test_an_abandoned_take_takes_nothing() -> None:
    async def scene() -> None:
        actor = ledger()
        abandoned = await begin(actor)
        leases = await actor.lease(2, "a#0")
        await actor.abandon_take()
        assert await abandoned == ([], None)
        await actor.complete([finished(lease) for lease in leases], "a#0", {})
        groups, taken = await actor.advance_and_take(2, 0)
        assert taken is not None and taken.sequence_numbers == [group.sequence_number for group in groups] == [0, 1]

    asyncio.run(scene())


def test_a_resume_ends_a_take_that_waits_for_the_lost_timeline() -> None:
    async def scene() -> None:
        actor = ledger()
        abandoned = await begin(actor)
        await actor.load_state_dict({"version": 1, "trained": 2, "next": 2, "owed": []}, 1)
        assert await abandoned == ([], None)

    asyncio.run(scene())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    clock = SimpleNamespace(now_s=0.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr("hwrl.run.ledger.time", clock)
    return clock


def test_replicas_without_progress_on_a_prompt_are_named_and_lose_it(clock: SimpleNamespace) -> None:
    async def scene() -> None:
        actor = ledger()
        await begin(actor)
        (lease,) = await actor.lease(1, "a#0")
        for clock.now_s in (8.0, 16.0):
            await actor.renew([lease], "a#0")
        clock.now_s = 25.9
        assert await actor.expire_overdue() == []
        clock.now_s = 26.0
        assert await actor.expire_overdue() == ["a#0"]
        assert [lease.sequence_number for lease in await actor.lease(2, "b#1")] == [0, 1]

    asyncio.run(scene())


def test_a_forgotten_replica_reports_no_progress(clock: SimpleNamespace) -> None:
    async def scene() -> None:
        actor = ledger()
        await begin(actor)
        await actor.forget("a#0")
        leases = await actor.lease(2, "b#1")
        clock.now_s = 8.0
        await actor.renew(leases, "a#0")
        clock.now_s = 10.0
        assert await actor.expire_overdue() == ["b#1"]

    asyncio.run(scene())


def test_a_batch_comes_with_the_prompts_that_were_filtered_or_failed() -> None:
    async def scene() -> None:
        actor = ledger(filtered_in_a_row=9, on_failure="skip")
        batch = await begin(actor)
        first, second = await actor.lease(2, "a#0")
        await actor.complete([replace(finished(first), rewards=np.ones(2, dtype=np.float32))], "a#0", {})
        await actor.fail(second, "no judge")
        await actor.complete([finished(lease) for lease in await actor.lease(2, "a#0")], "a#0", {})
        _, info = cast("tuple[Any, BatchInfo]", await batch)
        assert info.sequence_numbers == [2, 3] and info.untrained == UntrainedPrompts([0], {1: "no judge"})
        assert (info.counts["filtered"], info.counts["failed"]) == (1, 1)

    asyncio.run(scene())


def test_a_stream_without_variance_ends_the_run() -> None:
    async def scene() -> None:
        actor = ledger(filtered_in_a_row=1)
        batch = await begin(actor)
        for lease in await actor.lease(2, "a#0"):
            await actor.complete([replace(finished(lease), rewards=np.ones(2, dtype=np.float32))], "a#0", {})
        with pytest.raises(DataError, match="last 2 groups taught nothing"):
            await batch

    asyncio.run(scene())


def test_an_error_that_was_to_end_the_run_is_forgotten_with_the_state() -> None:
    async def scene() -> None:
        actor = ledger()
        batch = await begin(actor)
        (lease,) = await actor.lease(1, "a#0")
        await actor.fail(lease, "no judge")
        with pytest.raises(EngineError, match="prompt 0 failed"):
            await batch
        await actor.load_state_dict(EMPTY_LEDGER, 1)
        batch = await begin(actor)
        leases = await actor.lease(2, "a#0")
        await actor.complete([replace(finished(lease), incarnation=1) for lease in leases], "a#0", {})
        _, info = cast("tuple[Any, BatchInfo]", await batch)
        assert info.sequence_numbers == [0, 1] and (info.ledger["trained"], info.ledger["owed"]) == (2, [])

    asyncio.run(scene())
