"""Foreign texts of all kinds, from seeds: each ends with tokens or an error of hwrl, after work in proportion to it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from hwrl.errors import HwrlError
from hwrl.interfaces import Response, Sampling, ToolCall
from hwrl.rollout import ChatTokens, PolicyClient, Prompt
from hwrl.rollout.tool_calls import parse_tool_calls
from hwrl_agents.conversations import chat_keys
from hwrl_workflows import tool_use
from tests.support.agents import ask, chatml_policy, served
from tests.support.chat_models import STYLES

SEEDS = range(2)
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
PIECES = [
    "THE POLICY SAID THIS",
    "!",
    "<tool_call>",
    "</tool_call>",
    "</think>",
    "<|im_end|>",
    "<|im_start|>",
    '{"name": "add", "arguments": ',
    "{",
    "[",
    "}",
    '"',
    "\\ud800",
    "\ud800",
    "\x00",
    "\x1b[2J",
    "9" * 5000,
    "1e999",
    "NaN",
    "{{ 7 * 7 }}",
    "{% for x in range(10**9) %}",
    " ",
    "\n",
    "é",
    "مرحبا",
]


def text_from(chance: random.Random) -> str:
    """A mix of pieces, or one of them thousands of times."""
    if chance.random() < 0.3:
        return chance.choice(PIECES) * chance.choice([1, 50, 1000])
    return "".join(chance.choice(PIECES) for _ in range(chance.randrange(40)))


def value_from(chance: random.Random, depth: int = 0) -> Any:
    kind = chance.randrange(9 if depth < 5 else 6)
    if kind == 6:
        return [value_from(chance, depth + 1) for _ in range(chance.randrange(4))]
    if kind == 7:
        return {text_from(chance)[:20]: value_from(chance, depth + 1) for _ in range(chance.randrange(4))}
    if kind == 8:
        nested: Any = chance.choice([1, "x"])
        for _ in range(chance.choice([50, 150])):
            nested = [nested] if chance.random() < 0.5 else {"a": nested}
        return nested
    return [None, True, chance.choice([0, -1, 10**30, 1e308]), text_from(chance), "", "user"][kind]


def message_from(chance: random.Random) -> Any:
    if chance.random() < 0.1:
        return value_from(chance)
    message: dict[str, Any] = {
        "role": chance.choice(["system", "developer", "user", "assistant", "tool", "assistant"]),
        "content": text_from(chance) if chance.random() < 0.8 else value_from(chance),
    }
    if chance.random() < 0.4:
        arguments = text_from(chance) if chance.random() < 0.5 else value_from(chance)
        message["tool_calls"] = [{"function": {"name": text_from(chance)[:30], "arguments": arguments}}]
        if chance.random() < 0.2:
            message["tool_calls"] = value_from(chance)
    return message


def within_a_multiple(begin_s: float, peer_s: float) -> bool:
    """Whether the time since ``begin_s`` is in proportion: a quadratic way takes hundreds of times the peer's."""
    return time.process_time() - begin_s < 100 * peer_s + 2.0


def peer_time(chat: ChatTokens) -> float:
    begin_s = time.process_time()
    chat.encode("b" * 20_000)
    return time.process_time() - begin_s


@pytest.mark.parametrize("seed", SEEDS)
def test_any_conversation_gives_tokens_or_an_error_of_hwrl(seed: int) -> None:
    chance = random.Random(seed)
    for style in STYLES.values():
        chat = style.chat(max_length=4_000)
        peer_s = peer_time(chat)
        for _ in range(10):
            talk = [{"role": "user", "content": "1"}, *(message_from(chance) for _ in range(chance.randrange(1, 5)))]
            said = {"role": "assistant", "content": "x"}
            begin_s = time.process_time()
            for work in (
                partial(chat.prompt, talk, tools=TOOLS),
                partial(chat.following, [*talk, said, *talk], at=len(talk), said=chat.encode("x")),
                partial(chat.encode_prompt, talk, tools=json.dumps(TOOLS)),
            ):
                try:
                    work()
                except HwrlError as exc:
                    assert exc.what and exc.fix
            assert within_a_multiple(begin_s, peer_s), talk


@pytest.mark.parametrize("seed", SEEDS)
def test_any_text_of_the_policy_is_read(seed: int) -> None:
    chance, chat = random.Random(seed), STYLES["chatml"].chat(max_length=4_000)
    peer_s = peer_time(chat)
    for _ in range(40):
        text = text_from(chance)
        begin_s = time.process_time()
        try:
            ids = chat.encode(text)
        except HwrlError:  # it is too long
            continue
        response = Response(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), truncated=False)
        for answer in (chat.read(response, tools=TOOLS), parse_tool_calls(text)):
            for call in answer.tool_calls:
                assert isinstance(call, ToolCall)
                assert isinstance(json.loads(call.arguments), dict)
        assert within_a_multiple(begin_s, peer_s), text


def test_a_call_of_any_depth_is_read_or_is_text() -> None:
    """Between the depths that JSON reads and those that it writes lie a few that it reads only."""
    for depth in [*range(300, 1100), 100_000]:
        for before, middle, after in ("[ ]", ('{"a":', "1", "}")):
            arguments = before * depth + middle + after * depth
            parsed = parse_tool_calls('<tool_call>{"name": "a", "arguments": {"x": ' + arguments + "}}</tool_call>")
            assert len(parsed.tool_calls) in (0, 1)
            call = {"function": {"name": "a", "arguments": arguments}}
            assert chat_keys([{"role": "assistant", "content": "", "tool_calls": [call]}], tools=[], options={})


results = random.Random()


def odd(value: str) -> Any:
    """Return anything.

    Args:
        value: anything
    """
    return value_from(results) if results.random() < 0.7 else {"odd": {1, 2}, "deep": value_from(results)}


@pytest.mark.parametrize("seed", SEEDS)
def test_any_call_of_a_tool_and_any_result_continues_or_ends_the_conversation(seed: int) -> None:
    chance = random.Random(seed)
    results.seed(seed)
    for _ in range(15):
        arguments = {chance.choice(["value", text_from(chance)[:20]]): value_from(chance)}
        call = json.dumps({"name": chance.choice(["odd", "none"]), "arguments": arguments})
        policy = chatml_policy(f"<tool_call>{call}</tool_call>", max_length=4_000, sampling=Sampling(1 << 30))
        limits: Any = {"sampling": policy.sampling, "max_length": policy.max_length, "vocabulary": 1000}
        client = PolicyClient(policy.generate, chat=policy.chat, **limits)
        workflow = tool_use(tokenizer=policy.chat.tokenizer, tools=[f"{__name__}:odd"], max_turns=3)
        prompt = Prompt("", policy.chat.encode("1"), None, messages=[{"role": "user", "content": "1"}])
        running: Any = workflow(client, prompt)
        assert asyncio.run(running).trained_segments


@pytest.mark.parametrize("seed", SEEDS)
def test_any_request_to_an_endpoint_has_a_status_and_a_message(seed: int) -> None:
    chance, policy = random.Random(seed), chatml_policy("Two.", max_length=4_000)

    async def ask_all() -> None:
        async with served(policy) as endpoint:
            for _ in range(25):
                if chance.random() < 0.8:
                    path, body = "chat/completions", {"messages": [message_from(chance) for _ in range(3)]}
                else:
                    path, body = "completions", {"prompt": value_from(chance)}
                if chance.random() < 0.2:
                    body[chance.choice(["tools", "stop", "n", "seed", "chat_template_kwargs"])] = value_from(chance)
                answer = await ask(endpoint, path, body)
                assert answer.status in (200, 400), (body, answer.body)
                assert answer.status == 200 or answer.body["error"]["message"], body

    asyncio.run(ask_all())
