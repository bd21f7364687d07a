"""Workflows: trajectories of several turns, failures, limits, drops; on a scripted engine."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from hwrl.errors import DataError, EngineError
from hwrl.interfaces import GenerationRequest, RolloutEngine, Sampling, Segment, Trajectory
from hwrl.rollout import (
    ChatTokens,
    LoopSettings,
    PendingGroup,
    PolicyClient,
    Prompt,
    Rollouter,
    Workflow,
    WorkflowGenerator,
    WorkflowSettings,
    load_workflow,
)
from hwrl.rollout.generation import mean_metrics
from tests.support.chat_models import STYLES
from tests.support.scripted_rollout import CountingEngine, Desk, InlineScorer, Lengths, Updater, step_until
from tests.support.speed import slow
from tests.support.workflow_runs import single_turn

Make = Callable[..., WorkflowGenerator]
PAGE = Path(__file__).parents[2] / "docs" / "workflows.md"


@pytest.fixture
def make() -> Iterator[Make]:
    """Return a maker of generators of a workflow on a counting engine; they are closed at the end."""
    made: list[WorkflowGenerator] = []

    def generator_of(
        workflow: Workflow, *, engine: RolloutEngine | None = None, tokenizer: Any = None, **settings: Any
    ) -> WorkflowGenerator:
        chosen = {"group_size": 2, "max_samples": 8, "max_length": 12, "vocabulary": 100, "timeout_s": 600, **settings}
        limits = WorkflowSettings(**chosen)
        made.append(WorkflowGenerator(engine or CountingEngine(), workflow, tokenizer=tokenizer, settings=limits))
        return made[-1]

    yield generator_of
    for generator in made:
        generator.close()


async def two_turns(client: PolicyClient, prompt: Prompt) -> Trajectory:
    trajectory = client.begin(prompt.token_ids)
    await trajectory.generate()
    await asyncio.sleep(0)
    trajectory.add([7, 8])
    last = await trajectory.generate()
    trajectory.reward_turn(0.5)
    return trajectory.finish(reward=float(len(last.token_ids)), metrics={"turns": 2.0})


def step_to_the_end(generator: WorkflowGenerator) -> list[Any]:
    finished: list[Any] = []
    deadline_s = time.monotonic() + 200.0
    while generator.pending():
        assert time.monotonic() < deadline_s, "it never ended"
        finished += generator.step()
        time.sleep(0.001)
    return finished


def start(generator: WorkflowGenerator, number: int = 1, size: int = 2) -> Any:
    group = PendingGroup(Lengths()[number], size)
    generator.start(group, Sampling(10))
    return group


def test_a_trajectory_of_several_turns_has_the_engines_tokens_and_the_tools(make: Make) -> None:
    generator = make(two_turns)
    group = start(generator)
    assert step_to_the_end(generator) == [group] and group.is_generated
    for row in group.trajectories:
        assert [part.by_policy for part in row.segments] == [False, True, False, True]
        assert [part.token_ids.tolist() for part in row.segments] == [[2], [1, 2], [7, 8], [1, 2]]
        assert row.segments[3].logprobs is not None and row.segments[3].logprobs.tolist() == [-1, -2]
        assert row.segments[3].rewards is not None and row.segments[3].rewards.tolist() == [0, 0.5]
    assert generator.tokens == 8
    group.score(InlineScorer(lambda *_: 9.0))
    assert group.metrics() == [{"reward": 2.0, "turns": 2.0}] * 2


@pytest.mark.parametrize(("answer", "reward", "turns"), [("\n !", 1.0, 1), ("another", 0.0, 3)])
def test_the_workflow_of_the_page_takes_turns_until_it_is_right(
    make: Make, answer: str, reward: float, turns: int
) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, "workflows.md", "exec"), names)
    tokenizer = STYLES["chatml"].tokenizer()
    generator = make(names["factory"](tokenizer=tokenizer, turns=3), tokenizer=tokenizer, max_length=64)
    says_six = Prompt("", np.array([6], dtype=np.int32), answer)
    group = PendingGroup(says_six, 2)
    generator.start(group, Sampling(10))
    step_to_the_end(generator)
    for row in group.trajectories:
        said = [tokenizer.decode(part.token_ids, skip_special_tokens=True) for part in row.segments[1:]]
        assert said == ["\n !", "wrong>"] * (turns if reward == 0 else 0) + (["\n !"] if reward else [])
    group.score(InlineScorer(lambda *_: 9.0))
    assert group.metrics() == [{"reward": reward, "turns": turns}] * 2


def test_a_single_turn_as_a_workflow_is_the_single_turn(make: Make) -> None:
    generator = make(single_turn)
    group = start(generator)
    step_to_the_end(generator)
    (row, _) = group.trajectories
    assert row.response_ids.tolist() == [1, 2] and row.reward is None and not row.truncated


def test_many_run_at_once_and_room_counts_their_samples(make: Make) -> None:
    generator = make(two_turns, max_samples=1000, engine=CountingEngine(room=4))
    groups = [start(generator) for _ in range(300)]
    assert generator.room() == 400 and generator.pending() == 300
    step_to_the_end(generator)
    assert all(group.is_generated for group in groups) and generator.room() == 1000


def test_every_run_may_block_a_thread_of_its_own(make: Make) -> None:
    barrier = threading.Barrier(40)

    async def waits_for_all(client: PolicyClient, prompt: Prompt) -> Trajectory:
        await asyncio.to_thread(barrier.wait, 20)
        return await two_turns(client, prompt)

    generator = make(waits_for_all, max_samples=40, attempts=1, timeout_s=300.0)
    groups = [start(generator) for _ in range(20)]
    step_to_the_end(generator)
    assert all(group.is_generated for group in groups)


def test_a_run_that_raises_is_repeated_and_then_fails_its_group(make: Make) -> None:
    calls: list[int] = []

    async def fails_at_first(client: PolicyClient, prompt: Prompt) -> Trajectory:
        calls.append(1)
        if len(calls) == 1:
            raise ValueError("the tool is away")
        return await two_turns(client, prompt)

    generator = make(fails_at_first)
    group = start(generator)
    step_to_the_end(generator)
    assert group.is_generated and len(calls) == 3 and generator.failed_runs == 1

    async def always_fails(client: PolicyClient, prompt: Prompt) -> Trajectory:
        raise ValueError("the tool is away")

    generator = make(always_fails, attempts=3)
    group = start(generator)
    assert step_to_the_end(generator) == [group]
    assert not group.is_generated and "the tool is away" in str(group.result().failure)


@pytest.mark.parametrize("result", [None, [], 3])
def test_a_run_without_trajectories_has_failed(make: Make, result: Any) -> None:
    async def nothing(client: PolicyClient, prompt: Prompt) -> Any:
        return result

    generator = make(nothing, attempts=1)
    group = start(generator, size=1)
    step_to_the_end(generator)
    assert "a workflow returns a Trajectory" in str(group.result().failure)


def test_a_dropped_run_does_not_begin_again(make: Make) -> None:
    begun: list[asyncio.AbstractEventLoop] = []
    ended: list[int] = []

    async def fails_at_its_end(client: PolicyClient, prompt: Prompt) -> Trajectory:
        begun.append(asyncio.get_running_loop())
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append(1)
            raise ValueError("the tool cannot be closed")

    generator = make(fails_at_its_end)
    start(generator)
    deadline_s = time.monotonic() + 200.0
    while len(begun) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    generator.drop()
    while len(ended) < 2:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), begun[0]).result()
    assert len(begun) == 2 and generator.failed_runs == 0


@pytest.mark.parametrize(
    ("column", "values", "told"),
    [
        ("token_ids", [7, 8], None),
        ("token_ids", np.array([7.0, 8.5, 2.0**40])[1:], "token_ids of a segment"),
        ("versions", [0, 0], None),
        ("versions", [None, None], "NoneType"),
        ("versions", np.array([0.5, 0]), "versions of a segment"),
        ("logprobs", np.full((2, 1), -1.0), "logprobs of a segment"),
        ("rewards", [1, 0], None),
        ("rewards", np.array([1.0, 1e300]), "not a finite number"),
        ("rewards", np.ones((2, 2)), "rewards of a segment"),
    ],
)
def test_the_columns_of_a_users_segments_get_their_types_or_fail_the_run(
    make: Make, column: str, values: Any, told: str | None
) -> None:
    given: Any = {"token_ids": [7, 8], "logprobs": [-1.0, -2.0], "versions": [0, 0], column: values}
    types = {"token_ids": np.int32, "logprobs": np.float32, "versions": np.int32, "rewards": np.float32}

    async def builds_its_own(client: PolicyClient, prompt: Prompt) -> Trajectory:
        return Trajectory([Segment(cast(Any, [1, 2])), Segment(**given)])

    generator = make(builds_its_own, attempts=1)
    group = start(generator)
    step_to_the_end(generator)
    if told is not None:
        assert told in str(group.result().failure)
        return
    ((row,),) = group.samples[:1]
    for name, dtype in types.items():
        assert all(one is None or one.dtype == dtype for one in (getattr(part, name) for part in row.segments))
    assert row.segments[0].token_ids.tolist() == [1, 2]


def test_a_factory_that_raises_whatever_is_told(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def make(tokenizer):\n    raise SystemExit(3)\n")
    with pytest.raises(DataError, match=r"made no workflow\n(.|\n)*SystemExit\(3\)"):
        load_workflow(f"{tmp_path}/mine.py:make", {}, tokenizer=None)


def test_a_trajectory_is_truncated_or_not(make: Make) -> None:
    async def says_both(client: PolicyClient, prompt: Prompt) -> Trajectory:
        return replace(await single_turn(client, prompt), truncated=cast(Any, [True, False]))

    generator = make(says_both, attempts=1)
    group = start(generator)
    step_to_the_end(generator)
    assert "truncated is true or false, not [True, False]" in str(group.result().failure)


def test_more_prompts_than_there_is_room_for_wait(make: Make) -> None:
    """An evaluation starts all of its prompts, and the limit of time is that of a run, without the wait."""
    running: list[int] = []
    most: list[int] = []

    async def counted(client: PolicyClient, prompt: Prompt) -> Trajectory:
        running.append(1)
        most.append(len(running))
        await asyncio.sleep(slow(0.05))
        running.pop()
        return await two_turns(client, prompt)

    generator = make(counted, max_samples=4, timeout_s=slow(0.4), attempts=1)
    groups = [start(generator) for _ in range(30)]
    step_to_the_end(generator)
    assert all(group.is_generated for group in groups) and max(most) <= 4


@pytest.mark.parametrize(
    ("tokens", "reward", "told"), [([100], 1.0, "token 100"), ([-1], 1.0, "token -1"), ([7], float("nan"), "finite")]
)
def test_a_trajectory_that_cannot_be_trained_has_failed(
    make: Make, tokens: list[int], reward: float, told: str
) -> None:
    async def builds_its_own(client: PolicyClient, prompt: Prompt) -> Trajectory:
        said = Segment.of_response(await client.generate(prompt.token_ids), reward=reward)
        return Trajectory((Segment(np.array(tokens, dtype=np.int32)), said))

    generator = make(builds_its_own, attempts=1)
    group = start(generator)
    step_to_the_end(generator)
    assert told in str(group.result().failure)


def test_a_log_probability_that_is_no_number_is_a_failed_run(make: Make) -> None:
    async def damages_it(client: PolicyClient, prompt: Prompt) -> Trajectory:
        said = Segment.of_response(await client.generate(prompt.token_ids), reward=1.0)
        damaged = replace(said, logprobs=np.full(len(said.token_ids), np.nan, dtype=np.float32))
        return Trajectory((Segment(prompt.token_ids), damaged))

    generator = make(damages_it, attempts=1)
    group = start(generator)
    step_to_the_end(generator)
    assert "log-probability" in str(group.result().failure)


@pytest.mark.parametrize(
    ("reward", "metrics"), [(float("nan"), {}), (1.0, {"turns": float("inf")}), (None, {"mean": 1.0})]
)
def test_a_reward_or_metric_that_cannot_be_trained_is_a_failed_run(make: Make, reward: Any, metrics: Any) -> None:
    async def rewards(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        return trajectory.finish(reward, metrics)

    generator = make(rewards, attempts=1)
    group = start(generator, size=1)
    step_to_the_end(generator)
    assert "metric" in str(group.result().failure)


def test_a_reward_and_metrics_of_any_numeric_type_become_floats(make: Make) -> None:
    async def rewards(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        half: Any = torch.tensor(0.5, requires_grad=True)
        cost: Any = Decimal("1.5")
        return trajectory.finish(half, {"score": half, "cost": cost})

    generator = make(rewards)
    group = start(generator)
    step_to_the_end(generator)
    group.score(InlineScorer(lambda *_: 9.0))
    assert mean_metrics(group.metrics()) == {"reward": 0.5, "score": 0.5, "cost": 1.5}


def test_a_run_that_takes_too_long_has_failed_and_blocks_nobody(make: Make) -> None:
    async def waits(client: PolicyClient, prompt: Prompt) -> Trajectory:
        if prompt.answer == 3:
            await asyncio.sleep(1e6)
        return await two_turns(client, prompt)

    generator = make(waits, timeout_s=slow(0.5), attempts=1)
    late, fast = start(generator, 3), start(generator, 1)
    assert step_to_the_end(generator) == [fast, late]
    assert f"within {slow(0.5):g} s" in str(late.result().failure) and fast.is_generated


def test_a_conversation_has_only_the_room_of_the_context(make: Make) -> None:
    errors: list[EngineError] = []

    async def talks_on(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        while trajectory.room > 0:
            await trajectory.generate()
            trajectory.add([7] * min(4, trajectory.room))
        try:
            await client.generate(trajectory.token_ids)
        except EngineError as error:
            errors.append(error)
        return trajectory.finish()

    generator = make(talks_on)
    group = start(generator)
    step_to_the_end(generator)
    assert group.is_generated and len(errors) == 2 and "max_model_len" in errors[0].fix
    with pytest.raises(EngineError, match="no token 100"):
        unused: Any = None
        chat = ChatTokens(None, end_ids=())
        client = PolicyClient(unused, chat=chat, sampling=Sampling(1), max_length=9, vocabulary=100)
        asyncio.run(client.generate([100]))
    with pytest.raises(EngineError, match="a greedy response cannot be trained"):
        asyncio.run(client.generate([1], Sampling(1, temperature=0)))


class Choosy(CountingEngine):
    """Refuses requests of temperature 5, and fails at one of temperature 6."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        if requests[0].sampling.temperature == 6:
            self.version = -1
        if requests[0].sampling.temperature >= 5:
            raise EngineError("too hot")
        super().submit(requests)


def test_a_refused_request_is_its_workflows_error_alone(make: Make) -> None:
    async def asks(client: PolicyClient, prompt: Prompt) -> Trajectory:
        with pytest.raises(EngineError, match="too hot"):
            await client.generate([2], Sampling(3, temperature=5.0))
        return await two_turns(client, prompt)

    generator = make(asks, engine=Choosy())
    group = start(generator)
    step_to_the_end(generator)
    assert group.is_generated

    async def breaks(client: PolicyClient, prompt: Prompt) -> Trajectory:
        await client.generate([2], Sampling(3, temperature=6.0))
        raise AssertionError("the engine has failed")

    generator = make(breaks, engine=Choosy())
    start(generator)
    with pytest.raises(EngineError, match="too hot"):
        step_to_the_end(generator)


def test_dropped_work_never_comes_back(make: Make) -> None:
    ended: list[str] = []

    async def watched(client: PolicyClient, prompt: Prompt) -> Trajectory:
        try:
            return await two_turns(client, prompt)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    engine = CountingEngine()
    generator = make(watched, engine=engine)
    start(generator, 5)
    deadline_s = time.monotonic() + 200.0
    while not engine.pending():
        assert time.monotonic() < deadline_s
        generator.step()
    generator.drop()
    assert not generator.pending() and not engine.pending()
    group = start(generator)
    assert step_to_the_end(generator) == [group] and ended == ["cancelled"] * 2


def test_rewards_of_some_trajectories_only_fail_the_group(make: Make) -> None:
    calls: list[int] = []

    async def first_only(client: PolicyClient, prompt: Prompt) -> Sequence[Trajectory]:
        calls.append(len(calls))
        first = calls[-1] == 0
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        return [trajectory.finish(reward=1.0 if first else None)]

    generator = make(first_only)
    group = start(generator)
    step_to_the_end(generator)
    group.score(InlineScorer(lambda *_: 0.0))
    assert "1 of 2 trajectories" in str(group.result().failure)


def rollouter_of(generator: WorkflowGenerator, desk: Desk, updater: Updater, *, partial: bool = True) -> Rollouter:
    return Rollouter(
        updater.engine,
        ledger=desk,
        prompts=Lengths(),
        rewards=InlineScorer(lambda *_: 0.0),
        weights=updater,
        settings=LoopSettings(sampling=Sampling(10), group_size=2, partial_rollout=partial),
        generator=generator,
    )


def test_a_rollouter_hands_in_trajectories_and_reports_failures(make: Make) -> None:
    async def mostly(client: PolicyClient, prompt: Prompt) -> Trajectory:
        if prompt.answer == 2:
            raise ValueError("no such tool")
        return await two_turns(client, prompt)

    desk, updater = Desk([0, 1, 2, 3]), Updater()
    rollouter = rollouter_of(make(mostly, engine=updater.engine, attempts=1), desk, updater)
    step_until(rollouter, lambda: len(desk.groups) == 3 and bool(desk.failed))
    assert sorted(group.sequence_number for group in desk.groups) == [0, 1, 3]
    assert desk.failed[0][0] == 2 and "no such tool" in desk.failed[0][1]
    (group, *_) = sorted(desk.groups, key=lambda group: group.sequence_number)
    assert group.loss_mask.tolist() == [True, False, False, True] * 2 and group.metrics["turns"] == 2.0


def test_without_partial_rollout_weights_wait_for_whole_trajectories(make: Make) -> None:
    desk, updater = Desk([3, 4]), Updater()
    generator = make(two_turns, engine=updater.engine, max_length=30)
    rollouter = rollouter_of(generator, desk, updater, partial=False)
    step_until(rollouter, lambda: generator.pending() > 0)
    updater.offered.append(1)
    step_until(rollouter, lambda: len(desk.groups) == 2 and updater.engine.version == 1)
    assert all(set(group.versions[group.loss_mask]) == {0} for group in desk.groups)


def test_weights_may_change_between_and_within_turns(make: Make) -> None:
    desk, updater = Desk([5]), Updater()

    async def updates_between(client: PolicyClient, prompt: Prompt) -> Trajectory:
        trajectory = client.begin(prompt.token_ids)
        await trajectory.generate()
        updater.offered.append(1)
        while updater.offered:
            await asyncio.sleep(0.001)
        await trajectory.generate()
        return trajectory.finish(reward=1.0)

    rollouter = rollouter_of(make(updates_between, engine=updater.engine, max_length=30), desk, updater)
    step_until(rollouter, lambda: bool(desk.groups))
    (group,) = desk.groups
    assert (group.oldest_version, group.newest_version) == (0, 1) and np.all(np.diff(group.versions[:12]) >= 0)
