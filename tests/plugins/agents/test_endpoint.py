"""Endpoints over HTTP: what agents read, what is recorded, what is refused."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import urllib.parse
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest

from hwrl.errors import ConfigError, EngineError
from hwrl.interfaces import ParsedAnswer, Response, Sampling
from hwrl_agents import Endpoint
from hwrl_agents import server as server_module
from hwrl_agents.conversations import Conversations, Turn
from hwrl_agents.requests import ChatRequest
from hwrl_agents.server import EndpointServer
from tests.support.agents import ScriptedPolicy, ask, chat, chatml_policy, served

USER = {"role": "user", "content": "1 + 1?"}
AGAIN = {"role": "user", "content": "Sure?"}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call>'
Agent = Callable[[Endpoint, ScriptedPolicy], Awaitable[None]]


def with_policy(*texts: str, **fields: Any) -> Callable[[Agent], Callable[[], None]]:
    """Run the test, an agent, beside an endpoint of a policy that says ``texts``."""

    def decorate(agent: Agent) -> Callable[[], None]:
        async def run() -> None:
            policy = chatml_policy(*texts, **fields)
            async with asyncio.timeout(60), served(policy) as endpoint:
                await agent(endpoint, policy)

        @functools.wraps(agent)
        def test() -> None:
            asyncio.run(run())

        del test.__wrapped__  # pytest would look for the agent's parameters
        return test

    return decorate


def text(policy: ScriptedPolicy, ids: Any) -> str:
    return policy.chat.decode(ids, special=True)


@with_policy("Two.")
async def test_an_answer_has_openais_form(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER], logprobs=True, top_logprobs=1, return_token_ids=True)
    assert answer.status == 200 and answer.message == {"role": "assistant", "content": "Two."}
    (choice,) = answer.body["choices"]
    assert choice["finish_reason"] == "stop" and choice["token_ids"] == policy.said[0].token_ids.tolist()
    assert answer.body["prompt_token_ids"] == policy.asked[0][0].tolist()
    assert text(policy, policy.asked[0][0]) == "<|im_start|>user\n1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    row = choice["logprobs"]["content"][1]
    assert (row["token"], row["logprob"], row["bytes"]) == ("w", -2.0, [ord("w")]) and len(row["top_logprobs"]) == 1
    prompt, said = len(policy.asked[0][0]), len(policy.said[0].token_ids)
    assert answer.body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
    }
    models = await ask(endpoint, "models")
    assert models.body["data"][0]["id"] == "policy" and models.body["data"][0]["max_model_len"] == 2000


@with_policy("Two.", "Yes, two.", "I am.")
async def test_a_conversation_is_one_trajectory_of_the_engines_tokens(
    endpoint: Endpoint, policy: ScriptedPolicy
) -> None:
    messages: list[Any] = [USER]
    for new in (AGAIN, AGAIN, None):
        answer = await chat(endpoint, messages)
        messages = [*messages, {**answer.message, "refusal": None}, *([new] if new else [])]
    (row,) = endpoint.trajectories()
    assert [part.by_policy for part in row.segments] == [False, True] * 3 and not row.truncated
    for part, said in zip(row.segments[1::2], policy.said, strict=True):
        assert part.token_ids is said.token_ids and part.logprobs is said.logprobs and part.versions is said.versions
    assert policy.asked[2][0].tolist() == [token for part in row.segments[:-1] for token in part.token_ids]
    assert text(policy, row.segments[2].token_ids) == "\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"


@with_policy(CALL, "Two.")
async def test_tools_are_offered_called_and_answered(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER], tools=[TOOL])
    (call,) = answer.message["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1, "b": 1}'} and call["type"] == "function"
    assert answer.body["choices"][0]["finish_reason"] == "tool_calls" and answer.message["content"] is None
    rewritten = {**call, "id": "mine", "function": {"name": "add", "arguments": '{"b":1,"a":1}'}}
    said = {"role": "assistant", "tool_calls": [rewritten]}
    await chat(endpoint, [USER, said, {"role": "tool", "tool_call_id": "mine", "content": "2"}], tools=[TOOL])
    (row,) = endpoint.trajectories()
    assert text(policy, row.segments[1].token_ids) == CALL + "<|im_end|>"
    assert "<tool_response>\n2\n</tool_response>" in text(policy, row.segments[2].token_ids)
    assert "add" in text(policy, row.segments[0].token_ids)


@with_policy('<tool_call>{"name": "a\\ud800", "arguments": {"b": "\\udc00\\ud83d\\ude00"}}</tool_call>', "Two.")
async def test_a_lone_surrogate_in_a_call_is_a_question_mark(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER], tools=[TOOL])
    (call,) = answer.message["tool_calls"]
    assert answer.status == 200 and call["function"] == {"name": "a?", "arguments": '{"b": "?\U0001f600"}'}
    await chat(endpoint, [USER, answer.message, {"role": "tool", "content": "2"}], tools=[TOOL])
    (row,) = endpoint.trajectories()
    assert len(row.segments) == 4


@with_policy("Two.")
async def test_an_answer_that_cannot_be_sent_is_not_recorded(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    generate = policy.generate

    async def damaged(token_ids: Any, sampling: Sampling | None = None) -> Response:
        said = await generate(token_ids, sampling)
        return replace(said, logprobs=np.full(len(said.token_ids), np.nan, np.float32))

    policy.generate = damaged  # type: ignore[method-assign] # this policy alone
    answer = await chat(endpoint, [USER], logprobs=True)
    assert answer.status == 500 and not endpoint.trajectories()


@with_policy(CALL)
async def test_with_tool_choice_none_a_call_is_text(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER], tools=[TOOL], tool_choice="none")
    assert answer.message["content"] == CALL and "tool_calls" not in answer.message


@with_policy("Two.", "Three.", "Yes.", "No.")
async def test_each_choice_is_a_trajectory_and_each_token_is_trained_once(
    endpoint: Endpoint, policy: ScriptedPolicy
) -> None:
    answer = await chat(endpoint, [USER], n=2, seed=5)
    assert [choice["index"] for choice in answer.body["choices"]] == [0, 1]
    assert [sampling.seed for _, sampling in policy.asked] == [5, 6]
    chosen = [USER, {"role": "assistant", "content": "Three."}, AGAIN]
    await chat(endpoint, chosen)
    await chat(endpoint, chosen)
    rows = endpoint.trajectories()
    assert [[part.by_policy for part in row.segments] for row in rows] == [
        [False, True],
        [False, True, False, True],
        [False, True],  # "Three." is in its context
    ]
    trained = [part.token_ids for row in rows for part in row.segments if part.by_policy]
    assert sorted(map(list, trained)) == sorted(list(said.token_ids) for said in policy.said)
    assert rows[2].segments[0].token_ids.tolist() == policy.asked[3][0].tolist()


@with_policy("Two.", "Sure.")
async def test_a_rewritten_history_begins_a_trajectory(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    await chat(endpoint, [USER])
    await chat(endpoint, [USER, {"role": "assistant", "content": "2"}, AGAIN])
    first, second = endpoint.trajectories()
    assert len(first.segments) == len(second.segments) == 2
    assert "assistant\n2<|im_end|>" in text(policy, second.segments[0].token_ids)


@with_policy(" Two.", "Sure.")
async def test_white_space_around_an_answer_does_not_count(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    await chat(endpoint, [USER])
    await chat(endpoint, [USER, {"role": "assistant", "content": [{"type": "text", "text": "Two."}]}, AGAIN])
    assert len(endpoint.trajectories()) == 1


@with_policy("Two.")
async def test_other_tools_make_another_conversation(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER])
    await chat(endpoint, [USER, answer.message, AGAIN], tools=[TOOL])
    assert len(endpoint.trajectories()) == 2


@with_policy("Two.", "Three.", CALL)
async def test_a_stream_has_the_same_content(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(
        endpoint, [USER], n=2, stream=True, stream_options={"include_usage": True}, return_token_ids=True
    )
    events = answer.body
    assert events[-1]["usage"]["completion_tokens"] == 5 + 7 and events[-1]["choices"] == []
    for index, content in enumerate(["Two.", "Three."]):
        parts = [one for event in events for one in event["choices"] if one["index"] == index]
        assert "".join(part["delta"].get("content", "") for part in parts) == content
        assert [part["finish_reason"] for part in parts] == [None, "stop"]
        assert parts[0]["token_ids"] == policy.said[index].token_ids.tolist()
    events = (await chat(endpoint, [USER, AGAIN], stream=True, tools=[TOOL])).body
    calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
    assert [call["function"]["name"] for call in calls] == ["add"] and calls[0]["index"] == 0
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert len(endpoint.trajectories()) == 3


@with_policy("Two.", "Yes.")
async def test_completions_of_text_continue_text(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await ask(endpoint, "completions", {"prompt": "1 + 1 =", "logprobs": 1})
    (choice,) = answer.body["choices"]
    assert choice["text"] == "Two." and choice["finish_reason"] == "stop"
    assert choice["logprobs"]["tokens"][:2] == ["T", "w"] and choice["logprobs"]["text_offset"][:3] == [0, 1, 2]
    await ask(endpoint, "completions", {"prompt": "1 + 1 =Two.<|im_end|>\nSure?", "stream": True})
    (row,) = endpoint.trajectories()
    assert text(policy, row.segments[2].token_ids) == "\nSure?"


@with_policy("", "Two.")
async def test_the_same_text_after_an_empty_answer_is_a_new_request(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    for prompt in ("1 + 1 =", "1 + 1 =", "1 + 1 =<|im_end|>\nSure?"):
        await ask(endpoint, "completions", {"prompt": prompt})
    assert [text(policy, ids) for ids, _ in policy.asked] == ["1 + 1 =", "1 + 1 =", "1 + 1 =<|im_end|>\nSure?"]
    again, sequel = endpoint.trajectories()
    assert [text(policy, part.token_ids) for part in again.segments] == ["1 + 1 =", "Two.<|im_end|>"]
    assert text(policy, sequel.segments[1].token_ids) == "<|im_end|>" and sequel.segments[1].by_policy


@with_policy()
async def test_a_stop_text_is_said_once(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    policy.texts = ["Let me add.\nResult:"]
    for prompt in ("1 + 1 =", "1 + 1 =Let me add.\nResult: 2\n"):
        answer = await ask(endpoint, "completions", {"prompt": prompt, "stop": ["\nResult:"]})
        assert (
            answer.body["choices"][0]["text"] == "Let me add." and answer.body["choices"][0]["finish_reason"] == "stop"
        )
    (row,) = endpoint.trajectories()
    assert text(policy, row.segments[1].token_ids) == policy.texts[0]
    assert text(policy, row.segments[2].token_ids) == " 2\n"


@pytest.mark.parametrize("host", ["0.0.0.0", "localhost"])
def test_agents_elsewhere_get_an_address_of_the_machine(host: str) -> None:
    async def run() -> None:
        policy = chatml_policy("Two.")
        async with served(policy, host=host) as endpoint:
            assert (await ask(endpoint, "models")).status == 200
            assert "0.0.0.0" not in endpoint.base_url

    asyncio.run(run())


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7"):
        EndpointServer(host="192.0.2.7")


@with_policy("Two.", "Yes.")
async def test_completions_of_token_ids_continue_token_ids(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    prompt = policy.chat.encode("1 + 1 =").tolist()
    answer = await ask(endpoint, "completions", {"prompt": prompt, "return_token_ids": True})
    said = answer.body["choices"][0]["token_ids"]
    await ask(endpoint, "completions", {"prompt": [*prompt, *said, 9, 8]})
    await ask(endpoint, "completions", {"prompt": [*prompt, 9]})
    first, second = endpoint.trajectories()
    assert [part.token_ids.tolist() for part in first.segments][:3] == [prompt, said, [9, 8]]
    assert second.segments[0].token_ids.tolist() == [*prompt, 9]


@with_policy("Two.")
async def test_sampling_is_the_runs_with_the_requests_parameters(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    await chat(endpoint, [USER], temperature=0.5, top_p=0.9, stop="x", max_completion_tokens=3, presence_penalty=0)
    await chat(endpoint, [USER], max_tokens=500, user="me", parallel_tool_calls=True)
    assert policy.asked[0][1] == Sampling(3, 0.5, top_p=0.9, stop=("x",)) and policy.asked[1][1] == Sampling(100)
    first, _ = endpoint.trajectories()
    assert first.truncated and len(first.segments[1].token_ids) == 3


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 5}, "top_logprobs"),
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 0}, "temperature"),
        ({"temperature": 1e-46}, "temperature"),
        ({"top_k": 1 << 70}, "top_k"),
        ({"stop_token_ids": [1 << 70]}, "stop_token_ids"),
        ({"top_p": 2}, "top_p"),
        ({"anything": 1}, "anything"),
        ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"messages": []}, "messages"),
    ],
    ids=str,
)
def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    @with_policy("Two.")
    async def agent(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
        answer = await ask(endpoint, "chat/completions", {"messages": [USER], **fields})
        error = answer.body["error"]
        assert answer.status == 400 and error["param"] == param and error["type"] == "invalid_request_error"
        assert param in error["message"] and not policy.asked

    agent()


@with_policy("Two.")
async def test_bad_messages_are_refused_with_their_number(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    bad: Any
    for bad, reason in [
        (image, "messages[1] has a part of the type 'image_url'"),
        ({"role": "judge", "content": "x"}, "messages[1] has the role 'judge'"),
        ({"role": "user", "content": 3}, "messages[1] has a content"),
        ({"role": "assistant", "tool_calls": [{"id": 1}]}, "messages[1] has tool_calls"),
    ]:
        answer = await chat(endpoint, [USER, bad])
        assert answer.status == 400 and reason in answer.body["error"]["message"]
    for content in (b"{", b"[]", b"null"):
        assert (await ask(endpoint, "chat/completions", content=content)).status == 400
    answer = await ask(endpoint, "completions", {"model": "policy", "prompt": [1, 2**31 - 1]})
    assert answer.status == 400 and "and no 2147483647" in answer.body["error"]["message"]
    answer = await ask(endpoint, "embeddings", {})
    assert answer.status == 404 and "chat/completions" in answer.body["error"]["message"]
    assert (await ask(endpoint, "chat/completions")).status == 405


@with_policy("Two.")
async def test_a_template_of_the_agents_own_is_refused(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    """It would run in the thread of all workflows of the replica, for as long as it likes."""
    for name, value in [("chat_template", "{{ messages }}"), ("tokenize", True), ("add_generation_prompt", False)]:
        answer = await chat(endpoint, [USER], chat_template_kwargs={name: value})
        assert answer.status == 400 and f"{name!r} of the chat template" in answer.body["error"]["message"]
    assert not policy.asked


@with_policy("Two.", max_length=20)
async def test_a_conversation_without_room_is_refused(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER])
    assert answer.status == 400 and answer.body["error"]["code"] == "context_length_exceeded"


@with_policy("Two.", error=EngineError("the request cannot run", why="it is too hot"))
async def test_an_error_of_the_engine_is_one_of_the_server(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    answer = await chat(endpoint, [USER], n=2)
    assert answer.status == 500 and answer.body["error"]["message"] == "the request cannot run: it is too hot"
    assert endpoint.trajectories() == []


@with_policy("Two.")
async def test_only_the_token_of_its_run_opens_an_endpoint(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    name = endpoint.api_key.partition("-")[0]
    for wrong in ("", "x", name, f"{name}-", endpoint.api_key[:-1], "é"):
        answer = await ask(endpoint, "chat/completions", {"messages": [USER]}, token=wrong.encode().decode("latin-1"))
        assert (answer.status, answer.body) == (401, None)
        answer = await ask(endpoint, "embeddings", {}, token=wrong.encode().decode("latin-1"))
        assert (answer.status, answer.body) == (404, None), "a stranger is not told which paths there are"
    assert not policy.asked


def test_the_token_dies_with_the_run_and_never_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)

    async def run() -> str:
        policy = chatml_policy("Two.")
        policy.gate.clear()
        server = EndpointServer(host="127.0.0.1")
        server.start()
        with server.open(cast(Any, policy), chat=policy.chat) as other:
            with server.open(cast(Any, policy), chat=policy.chat) as endpoint:
                waiting = asyncio.ensure_future(chat(endpoint, [USER]))
                await policy.arrived.wait()
            ended, later = await waiting, await chat(endpoint, [USER])
            assert (ended.status, later.status) == (401, 401) and policy.cancelled == len(policy.asked) == 1
            assert (await ask(other, "models")).status == 200
        await server.aclose()
        return endpoint.api_key

    assert asyncio.run(run()) not in caplog.text


@with_policy("Two.", "Two.")
async def test_a_connection_without_a_request_is_closed(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    """Before a request, within its header, after it, and within a body that nobody reads; not during an answer."""
    url = urllib.parse.urlsplit(endpoint.base_url)
    assert url.hostname and url.port
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: "
    body = json.dumps({"model": "policy", "messages": [USER]}).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server_module, "HEADER_S", 0.3)
        opened = [await asyncio.open_connection(url.hostname, url.port) for _ in range(4)]
        opened[1][1].write(head)
        opened[2][1].write(head + b"1000000\r\n\r\n")
        policy.gate.clear()
        key = f"\r\nAuthorization: Bearer {endpoint.api_key}\r\n\r\n".encode()
        opened[3][1].write(head + str(len(body)).encode() + key + body)
        assert (await opened[2][0].read(12)).endswith(b" 401")
        for reader, _ in opened[:3]:
            await reader.read()  # until it is closed
        policy.gate.set()
        assert (await opened[3][0].read(12)).endswith(b" 200")
        await opened[3][0].readuntil(b"Two.")
    for _, writer in opened:
        writer.close()


def test_a_request_whose_body_arrives_after_the_run_is_not_answered() -> None:
    async def run() -> None:
        policy = chatml_policy("Two.")
        server = EndpointServer(host="127.0.0.1")
        server.start()
        with server.open(cast(Any, policy), chat=policy.chat) as endpoint:
            late = endpoint
        task = late.start(late.chat(ChatRequest(messages=[USER]), nbytes=1))
        await asyncio.wait([task])
        assert task.cancelled() and not policy.asked
        await server.aclose()

    asyncio.run(run())


def test_a_conversation_may_have_thousands_of_turns() -> None:
    conversations, last = Conversations(), None
    ids = np.array([7], np.int32)
    response = Response(ids, np.zeros(1, np.float32), ids, truncated=False)
    for number in range(3000):
        last = Turn(last, ids, response, ParsedAnswer(""))
        conversations.record(last, key=number)
    assert last is not None and len(last.token_ids) == 6000
    (row,) = conversations.trajectories()
    assert len(row.segments) == 6000


@pytest.mark.parametrize("stream", [False, True])
def test_the_request_of_a_client_that_leaves_is_dropped(stream: bool) -> None:
    @with_policy("Two.")
    async def agent(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
        policy.gate.clear()
        body = json.dumps({"messages": [USER], "stream": stream}).encode()
        host, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await policy.arrived.wait()
        writer.close()
        while not policy.cancelled:
            await asyncio.sleep(0)
        policy.gate.set()
        assert (await chat(endpoint, [USER])).status == 200
        assert len(endpoint.trajectories()) == 1

    agent()


def test_a_client_that_leaves_before_the_end_of_its_body_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    @with_policy("Two.")
    async def agent(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
        host, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
        for path in ("chat/completions", "completions"):
            reader, writer = await asyncio.open_connection(host, int(port))
            head = f"POST /v1/{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
            writer.write(f"{head}Content-Length: 1000\r\nExpect: 100-continue\r\n\r\n".encode())
            assert b" 100 " in await reader.readline(), "the body is being read"
            writer.write(b"half of it")
            await writer.drain()
            writer.close()
        assert (await chat(endpoint, [USER])).status == 200
        assert len(endpoint.trajectories()) == 1

    agent()
    assert not caplog.records


@with_policy("Two.")
async def test_a_reader_that_does_not_read_delays_nobody(endpoint: Endpoint, policy: ScriptedPolicy) -> None:
    policy.texts = ["x" * 60_000 + "<|im_end|>"]
    policy.sampling, policy.max_length = Sampling(100_000), 200_000
    host, _, port = endpoint.base_url.removeprefix("http://").removesuffix("/v1").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1)
    body = json.dumps({"messages": [USER], "stream": True, "logprobs": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {endpoint.api_key}\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert await reader.read(1)
    policy.texts = ["Two.<|im_end|>"]
    for _ in range(3):
        assert (await chat(endpoint, [USER])).message["content"] == "Two."
    writer.close()
