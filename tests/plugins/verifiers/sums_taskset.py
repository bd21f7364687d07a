"""A taskset of two sums, with a harness in this process: two turns over HTTP, one of them streamed."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf

__all__ = ["Sums", "TwoTurns"]


class SumData(vf.TaskData):  # type: ignore[misc] # no types here
    answer: int


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):  # type: ignore[misc]
    @vf.reward(weight=2.0)  # type: ignore[untyped-decorator]
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in trace.last_reply)

    @vf.metric  # type: ignore[untyped-decorator]
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):  # type: ignore[misc]
    broken: bool = False


class Sums(vf.Taskset[Sum, SumsConfig]):  # type: ignore[misc]
    def load(self) -> Iterator[Sum]:
        for number in (1, 2):
            prompt = "" if self.config.broken else f"{number} + {number}?"
            yield Sum(SumData(prompt=prompt, name=f"sum{number}", answer=2 * number), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc]
    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **_: Any
    ) -> vf.ProgramResult:
        messages = [{"role": "user", "content": data.prompt}]
        for stream in (False, True):
            text = await asyncio.to_thread(_ask, endpoint, secret, messages, stream=stream)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "Sure?"}]
        return vf.ProgramResult(exit_code=0 if data.prompt else 3, stdout="", stderr="no question")


def _ask(endpoint: str, secret: str, messages: list[dict[str, str]], *, stream: bool) -> str:
    body = json.dumps({"model": "any", "messages": messages, "stream": stream}).encode()
    headers = {"Authorization": f"Bearer {secret}", "Content-Type": "application/json", "Connection": "close"}
    with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/chat/completions", body, headers)) as answer:
        text = answer.read().decode()
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [json.loads(part.removeprefix("data: ")) for part in text.split("\n\n") if part.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
