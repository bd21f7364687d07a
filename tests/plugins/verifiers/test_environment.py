"""Environments of verifiers as workflows: exact tokens, its rewards, its errors, and no key in its records."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hwrl_verifiers
import hwrl_verifiers.tasks
from hwrl.errors import DataError, UnsupportedError
from hwrl.interfaces import Trajectory
from hwrl.rollout import EmbeddedEngine, PolicyClient, Prompt, Workflow
from hwrl_agents import Endpoint, EndpointServer
from tests.support.agents import ScriptedPolicy, chatml_policy
from tests.support.chat_models import STYLES
from tests.support.tiny_model import tiny_model
from tests.support.trained_agents import Witness, check_tokens, train_agents

needs_verifiers = pytest.mark.skipif(
    importlib.util.find_spec("verifiers") is None, reason="verifiers is not installed: pip install 'hwrl[verifiers]'"
)
TASKSET = {"id": "sums-taskset"}
LOCAL = {"agent": {"runtime": {"type": "subprocess"}}}


@pytest.fixture(autouse=True)
def _taskset_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def rows(tmp_path: Path) -> list[Prompt]:
    """Return the prompts that ``hwrl verifiers-rows`` writes."""
    file = tmp_path / "rows.jsonl"
    (command,) = hwrl_verifiers.hwrl_commands()
    parser = argparse.ArgumentParser()
    command.configure(parser)
    assert command.run(parser.parse_args([json.dumps(TASKSET), str(file)])) == 0
    return [prompt_of(json.loads(line)) for line in file.read_text().splitlines()]


def prompt_of(row: dict[str, Any]) -> Prompt:
    return Prompt(row["prompt"], np.array([1], np.int32), row["answer"], row={"task": row["task"]})


def workflow(**settings: Any) -> Workflow:
    return hwrl_verifiers.environment(tokenizer=None, **{"taskset": TASKSET, **LOCAL, **settings})


@asynccontextmanager
async def client_of(policy: ScriptedPolicy) -> AsyncIterator[PolicyClient]:
    common = {"sampling": policy.sampling, "max_length": policy.max_length, "vocabulary": 1000}
    yield PolicyClient(policy.generate, chat=policy.chat, **common)  # type: ignore[arg-type]  # a fake
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()  # as WorkflowGenerator ends its loop
    await asyncio.gather(*others, return_exceptions=True)


def play(policy: ScriptedPolicy, runs: Callable[[PolicyClient], Awaitable[Any]]) -> Any:
    async def with_client() -> Any:
        async with asyncio.timeout(60), client_of(policy) as client:
            return await runs(client)

    return asyncio.run(with_client())


@needs_verifiers
def test_an_episode_has_the_engines_tokens_and_verifiers_rewards(
    rows: Sequence[Prompt], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[str] = []
    opened = EndpointServer.open

    def note_key(self: EndpointServer, *args: Any, **kwargs: Any) -> Any:
        @contextmanager
        def block() -> Iterator[Endpoint]:
            with opened(self, *args, **kwargs) as endpoint:
                keys.append(endpoint.api_key)
                yield endpoint

        return block()

    monkeypatch.setattr(EndpointServer, "open", note_key)
    caplog.set_level(logging.DEBUG)
    policy = chatml_policy("Maybe.", "It is 4.")
    sums = workflow()

    async def both(client: PolicyClient) -> list[Sequence[Trajectory]]:
        return [await sums(client, prompt) for prompt in rows]  # type: ignore[misc]  # a fake

    (wrong,), (right,) = play(policy, both)
    assert (wrong.reward, right.reward) == (0.0, 2.0)
    assert right.metrics == {"right": 1.0, "length": 8.0, "turns": 2.0} and not right.truncated
    for row, first in ((wrong, 0), (right, 2)):
        assert [part.by_policy for part in row.segments] == [False, True, False, True]
        for part, said in zip(row.segments[1::2], policy.said[first:], strict=False):
            assert part.token_ids is said.token_ids and part.versions is said.versions
    assert "2 + 2?" in policy.chat.decode(right.segments[0].token_ids, special=True)
    assert len(set(keys)) == 2 and not any(key in caplog.text for key in keys)


@needs_verifiers
def test_an_episode_with_an_error_is_a_failed_run() -> None:
    taskset = {**TASKSET, "broken": True}
    env = hwrl_verifiers.tasks.load_env(taskset)
    task = hwrl_verifiers.tasks.load_tasks(env, limit=1)[0]
    prompt = prompt_of({"prompt": "x", "answer": task.key, "task": 0})
    broken = workflow(taskset=taskset)
    with pytest.raises(RuntimeError, match=r"the episode of task 0 failed: HarnessError: .*no question"):
        play(chatml_policy("Two."), lambda client: broken(client, prompt))


@needs_verifiers
@pytest.mark.parametrize(
    "row", [{"task": 2}, {"task": 0, "answer": "another"}, {"task": 1, "limit": 1}, {"task": ["a", "list"]}]
)
def test_a_row_of_another_taskset_is_refused(rows: Sequence[Prompt], row: dict[str, Any]) -> None:
    wrong = prompt_of({"prompt": "x", "answer": rows[0 if row["task"] == 0 else 1].answer, **row})
    limited = workflow(limit=row.get("limit"))
    with pytest.raises(DataError, match="is no task of this taskset"):
        play(chatml_policy("Two."), lambda client: limited(client, wrong))


@needs_verifiers
def test_an_infinite_taskset_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    taskset = importlib.import_module("sums_taskset").Sums
    monkeypatch.setattr(taskset, "INFINITE", True)
    with pytest.raises(DataError, match="is infinite"):
        workflow()
    assert callable(workflow(limit=1))


@needs_verifiers
def test_episodes_on_an_engine_whose_weights_change(rows: Sequence[Prompt]) -> None:
    style = STYLES["chatml"]
    tokenizer = style.tokenizer()
    ends = tokenizer.convert_tokens_to_ids(list(style.ends))
    engine = EmbeddedEngine(tiny_model(vocabulary=len(tokenizer)), eos_ids=ends, max_running=16, max_length=400)
    witness, sums = Witness(engine), workflow()

    def update() -> None:
        version = engine.version + 1
        weights = tiny_model(version, vocabulary=len(tokenizer)).state_dict()
        engine.load_weights(weights.items(), version=version)

    async def first_task(client: PolicyClient, prompt: Prompt) -> Any:
        return await sums(client, rows[0])

    update()
    got = train_agents(engine, first_task, tokenizer=tokenizer, end_ids=ends, update=update, steps_per_update=8)
    check_tokens(got, witness, turns=2, chat=style.chat())
    assert all(row.reward in (0.0, 2.0) and row.metrics["turns"] == 2.0 for row in got)
    engine.close()


@pytest.mark.skipif(importlib.util.find_spec("verifiers") is not None, reason="verifiers is installed")
def test_without_verifiers_the_error_tells_what_to_install() -> None:
    with pytest.raises(UnsupportedError, match="verifiers is not installed") as error:
        workflow()
    assert "hwrl[verifiers]" in str(error.value)
