"""The built-in workflows, on a scripted policy: text environments, and conversations with tools."""

from __future__ import annotations

import asyncio
import functools
import json
import re
import threading
from typing import Any

import numpy as np
import pytest

from hwrl.errors import DataError
from hwrl.interfaces import Ints, Sampling, Trajectory
from hwrl.rollout import PolicyClient, Prompt, Workflow
from hwrl_workflows import environment, tool_use
from tests.support.agents import ScriptedPolicy, chatml_policy
from tests.support.speed import slow as seconds


class Guess:
    """Wants ``answer``; says "more" or "less" meanwhile. A thread of its own plays it."""

    def __init__(self, *, limit: int = 9) -> None:
        self._limit, self._turns = limit, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        assert options is not None and options["prompt"] == "Guess a number." and options["level"] == 3
        self._wanted = int(options["answer"])
        return "Go on.", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert threading.current_thread() is not threading.main_thread()
        self._turns += 1
        found = int(action) == self._wanted
        text = "more" if int(action) < self._wanted else "less"
        return (
            text,
            1.0 if found else -0.25,
            found,
            self._turns >= self._limit,
            {
                "last": np.int64(action),
                "text": "x",
                "mean": 1.0,
                "loss": float("nan"),
                "reward": 9.0,
                "two words": 2,
            },
        )


def broken(**_: Any) -> Any:
    class Broken:
        async def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
            return "", {}

        async def step(self, action: str) -> float:
            return 1.0

    return Broken()


class Undecodable:
    """Says what is no UTF-8."""

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "caf\udce9", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, True, False, {}


class Ending:
    """Ends its process, or a generator, in the first step."""

    closed = 0

    def __init__(self, *, how: str = "") -> None:
        assert threading.current_thread() is not threading.main_thread()
        self._how = how

    def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "", {}

    def step(self, action: str) -> Any:
        if self._how == "exit":
            raise SystemExit(3)
        return next(iter([]))

    def close(self) -> None:
        Ending.closed += 1


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def pairs() -> dict[tuple[int, int], int]:
    """Return what JSON has no form for."""
    return {(1, 2): 3}


def leaves() -> None:
    """End the process."""
    raise SystemExit(3)


class GivenUp(BaseException):
    """As some libraries for time limits have it: not an Exception."""


def gives_up() -> None:
    """End without an Exception."""
    raise GivenUp


def tired() -> None:
    """Raise the error of a time limit of its own."""
    raise TimeoutError("the shop is closed")


def decorated(function: Any) -> Any:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


@decorated
async def later(a: int) -> int:
    """Return the number.

    Args:
        a: The number.
    """
    await asyncio.sleep(0)
    return a


async def slow(text: str) -> str:
    """Wait.

    Args:
        text: Anything.
    """
    await asyncio.sleep(1e6)
    return text


def undecodable() -> str:
    """Return a file's name that is no UTF-8, as the system gives it."""
    return "caf\udce9"


def undescribed(a: int) -> int:
    return a


def path_of(function: Any) -> str:
    return f"{__name__}:{function.__name__}"


def client_of(policy: ScriptedPolicy) -> PolicyClient:
    return PolicyClient(
        policy.generate,
        chat=policy.chat,
        sampling=policy.sampling,
        max_length=policy.max_length,
        vocabulary=1000,
    )


def prompt_of(policy: ScriptedPolicy, text: str = "Guess a number.", **fields: Any) -> Prompt:
    ids: Ints = policy.chat.encode(text)
    return Prompt(text, ids, 4, row={"level": 3}, **fields)


def run(workflow: Workflow, policy: ScriptedPolicy, prompt: Prompt) -> Trajectory:
    running: Any = workflow(client_of(policy), prompt)
    row = asyncio.run(running)
    assert isinstance(row, Trajectory)
    said = [part for part in row.segments if part.by_policy]
    for part, response in zip(said, policy.said, strict=True):
        assert np.array_equal(part.token_ids, response.token_ids)
    return row


def text_of(policy: ScriptedPolicy, row: Trajectory) -> str:
    return policy.chat.decode(np.concatenate([part.token_ids for part in row.segments]), special=True)


def test_an_episode_has_the_environments_texts_rewards_and_numbers() -> None:
    policy = chatml_policy("2", "7", "4")
    workflow = environment(tokenizer=policy.chat.tokenizer, make=path_of(Guess))
    row = run(workflow, policy, prompt_of(policy))
    end = "<|im_end|>"
    assert text_of(policy, row) == f"Guess a number.Go on.2{end}more7{end}less4{end}"
    assert row.reward == 0.5 and row.metrics == {"last": 4.0, "turns": 3.0} and not row.truncated


@pytest.mark.parametrize(("options", "limits"), [({"limit": 2}, {}), ({}, {"max_turns": 2})])
def test_an_episode_that_is_cut_off_is_truncated(options: dict[str, int], limits: dict[str, int]) -> None:
    policy = chatml_policy("1")
    workflow = environment(tokenizer=policy.chat.tokenizer, make=path_of(Guess), make_options=options, **limits)
    row = run(workflow, policy, prompt_of(policy))
    assert row.truncated and row.metrics["turns"] == 2 and row.reward == -0.5


def test_an_episode_ends_where_the_context_does() -> None:
    policy = chatml_policy("1", max_length=40)
    workflow = environment(tokenizer=policy.chat.tokenizer, make=path_of(Guess))
    row = run(workflow, policy, prompt_of(policy))
    assert row.truncated and sum(len(part.token_ids) for part in row.segments) <= 44
    tight = chatml_policy("1", max_length=18)
    with pytest.raises(DataError, match="has no turn"):
        run(environment(tokenizer=tight.chat.tokenizer, make=path_of(Guess)), tight, prompt_of(tight))


def test_an_observation_with_a_lone_surrogate_has_a_question_mark() -> None:
    policy = chatml_policy("1")
    workflow = environment(tokenizer=policy.chat.tokenizer, make=path_of(Undecodable))
    assert text_of(policy, run(workflow, policy, prompt_of(policy))).startswith("Guess a number.caf?1")


def test_a_step_that_returns_something_else_is_told() -> None:
    policy = chatml_policy("1")
    with pytest.raises(DataError, match="did not return what an environment returns"):
        run(environment(tokenizer=policy.chat.tokenizer, make=path_of(broken)), policy, prompt_of(policy))


@pytest.mark.parametrize("how", ["exit", "generator"])
def test_whatever_a_step_raises_is_told_at_once_and_the_environment_is_closed(how: str) -> None:
    policy, closed = chatml_policy("1"), Ending.closed
    workflow = environment(tokenizer=policy.chat.tokenizer, make=path_of(Ending), make_options={"how": how})
    with pytest.raises(RuntimeError, match=r"step raised (SystemExit|StopIteration)"):
        run(workflow, policy, prompt_of(policy))
    assert Ending.closed == closed + 1


CALL = '<tool_call>{"name": "add", "arguments": {"a": 20, "b": 3}}</tool_call>'
QUESTION = [{"role": "user", "content": "20 + 3?"}]


def test_tools_are_called_until_the_policy_answers() -> None:
    policy = chatml_policy(CALL, "It is 23.")
    workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(add)])
    row = run(workflow, policy, prompt_of(policy, messages=QUESTION))
    text = text_of(policy, row)
    assert "Add two numbers." in text or '"add"' in text or "add" in text.partition(CALL)[0]
    assert re.search(r"23.*It is 23\.<\|im_end\|>$", text.partition(CALL)[2], re.DOTALL)
    assert row.reward is None and row.metrics == {"turns": 2, "tool_calls": 1, "tool_errors": 0}


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"name": "multiply", "arguments": {}}, "there is no tool multiply; the tools are add, slow, pairs"),
        ({"name": "add", "arguments": {"a": 1}}, "missing 1 required positional argument"),
        ({"name": "slow", "arguments": {"text": "x"}}, f"did not answer within {seconds(2):g} s"),
        ({"name": "pairs", "arguments": {}}, "keys must be str"),
        ({"name": "leaves", "arguments": {}}, "SystemExit(3)"),
        ({"name": "gives_up", "arguments": {}}, "GivenUp()"),
        ({"name": "tired", "arguments": {}}, "the shop is closed"),
    ],
)
def test_the_policy_reads_what_was_wrong_with_its_call(call: dict[str, Any], told: str) -> None:
    policy = chatml_policy(f"<tool_call>{json.dumps(call)}</tool_call>", "I see.")
    tools = [path_of(each) for each in (add, slow, pairs, leaves, gives_up, tired)]
    workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=tools, timeout_s=seconds(2.0))
    row = run(workflow, policy, prompt_of(policy, messages=QUESTION))
    assert told in text_of(policy, row) and row.metrics["tool_errors"] == 1


def test_texts_with_lone_surrogates_reach_the_policy_with_question_marks() -> None:
    calls = [json.dumps({"name": name, "arguments": {}}) for name in ("undecodable", "sub\ud800")]
    policy = chatml_policy(
        "".join(f"<tool_call>{call}</tool_call>" for call in calls), "I see.", sampling=Sampling(300)
    )
    workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(undecodable)])
    row = run(workflow, policy, prompt_of(policy, messages=QUESTION))
    text = text_of(policy, row)
    assert "\ncaf?\n" in text and "there is no tool sub?;" in text and row.metrics["tool_errors"] == 1


def test_the_awaitable_of_a_decorated_tool_is_awaited() -> None:
    policy = chatml_policy('<tool_call>{"name": "later", "arguments": {"a": 123}}</tool_call>', "I see.")
    workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(later)])
    row = run(workflow, policy, prompt_of(policy, messages=QUESTION))
    assert "<tool_response>\n123\n</tool_response>" in text_of(policy, row) and row.metrics["tool_errors"] == 0


def test_calls_of_a_turn_run_at_the_same_time_and_turns_are_limited() -> None:
    policy = chatml_policy(CALL + CALL, sampling=Sampling(300))
    workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(add)], max_turns=3)
    row = run(workflow, policy, prompt_of(policy, messages=QUESTION))
    assert row.truncated and row.metrics == {"turns": 3, "tool_calls": 4, "tool_errors": 0}


def test_a_text_prompt_and_a_tool_without_a_description_are_refused() -> None:
    policy = chatml_policy("x")
    with pytest.raises(DataError, match="tools need a conversation"):
        run(tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(add)]), policy, prompt_of(policy))
    with pytest.raises(DataError, match="cannot be described"):
        tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(undescribed)])
    with pytest.raises(DataError, match="two tools have the same name"):
        tool_use(tokenizer=policy.chat.tokenizer, tools=[path_of(add), path_of(later), path_of(add)])
