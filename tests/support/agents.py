"""An endpoint of a scripted policy, and an agent that speaks HTTP with the standard library alone."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from hwrl.errors import EngineError
from hwrl.interfaces import Ints, Response, Sampling
from hwrl.rollout import ChatTokens
from hwrl_agents import Endpoint, EndpointServer
from tests.support.chat_models import STYLES


@dataclass
class ScriptedPolicy:
    """Says ``texts`` in turn, and keeps what it was asked; holds an answer while ``gate`` is closed."""

    chat: ChatTokens
    texts: Sequence[str] = ()
    sampling: Sampling = field(default_factory=lambda: Sampling(100))
    max_length: int = 2000
    vocabulary: int = 1 << 20
    error: EngineError | None = None

    def __post_init__(self) -> None:
        self.asked: list[tuple[Ints, Sampling]] = []
        self.said: list[Response] = []
        self.cancelled = 0
        self.arrived, self.gate = asyncio.Event(), asyncio.Event()
        self.gate.set()

    async def generate(self, token_ids: Ints, sampling: Sampling | None = None) -> Response:
        assert sampling is not None
        self.asked.append((token_ids, sampling))
        number = len(self.asked) - 1
        self.arrived.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        text = self.texts[number % len(self.texts)]
        stop = next((one for one in sampling.stop if text.endswith(one)), None)
        ids = self.chat.encode(text)
        truncated = len(ids) > sampling.max_new_tokens
        ids = ids[: sampling.max_new_tokens]
        logprobs = -np.arange(1, len(ids) + 1, dtype=np.float32) - number
        self.said.append(Response(ids, logprobs, np.full(len(ids), number, np.int32), truncated, stop))
        return self.said[-1]


@asynccontextmanager
async def served(policy: ScriptedPolicy, *, host: str = "127.0.0.1") -> AsyncIterator[Endpoint]:
    server = EndpointServer(host=host)
    server.start()
    try:
        with server.open(cast(Any, policy), chat=policy.chat) as endpoint:
            yield endpoint
    finally:
        await server.aclose()


def chatml_policy(*texts: str, **fields: Any) -> ScriptedPolicy:
    chat = STYLES["chatml"].chat(max_length=fields.get("max_length", ScriptedPolicy.max_length))
    return ScriptedPolicy(chat, [text + "<|im_end|>" for text in texts], **fields)


@dataclass
class HttpAnswer:
    """An answer: its status, and its JSON or the JSON of its events; None if it is empty."""

    status: int
    body: Any

    @property
    def message(self) -> dict[str, Any]:
        return dict(self.body["choices"][0]["message"])


def call(url: str, body: Any = None, *, token: str = "", content: bytes | None = None) -> HttpAnswer:
    """Ask ``url`` with the standard library, and wait."""
    content = content if content is not None or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, content, {"Authorization": f"Bearer {token}", "Connection": "close"})
    try:
        with urllib.request.urlopen(request, timeout=300) as answer:
            status, text, kind = answer.status, answer.read().decode(), answer.headers["content-type"]
    except urllib.error.HTTPError as exc:
        with exc:
            return HttpAnswer(exc.code, json.loads(exc.read() or b"null"))
    if kind.startswith("text/event-stream"):
        events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert events.pop() == "[DONE]"
        return HttpAnswer(status, [json.loads(event) for event in events])
    return HttpAnswer(status, json.loads(text))


async def ask(endpoint: Endpoint, path: str, body: Any = None, **fields: Any) -> HttpAnswer:
    """Ask ``endpoint`` from another thread."""
    fields.setdefault("token", endpoint.api_key)
    return await asyncio.to_thread(call, f"{endpoint.base_url}/{path}", body, **fields)


async def chat(endpoint: Endpoint, messages: Sequence[dict[str, Any]], **fields: Any) -> HttpAnswer:
    """Ask for a message after ``messages``."""
    return await ask(endpoint, "chat/completions", {"model": "policy", "messages": list(messages), **fields})
