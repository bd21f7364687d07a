"""A workflow: the policy calls tools in a conversation, in the form of the model's chat template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

from hwrl.errors import DataError, message_of, short_repr
from hwrl.interfaces import ToolCall, Trajectory
from hwrl.rollout import ChatTokens, PolicyClient, Prompt, TooLongError, Workflow, traced
from hwrl.user_code import load_function
from hwrl_workflows.environments import call_maybe_async

Tool: TypeAlias = Callable[..., Any] | Callable[..., Awaitable[Any]]
"""A function with type hints and a docstring in Google's style. The chat template shows both to the policy."""


def tool_use(*, tokenizer: Any, tools: Sequence[str], max_turns: int = 8, timeout_s: float = 30.0) -> Workflow:
    """Return a workflow that runs the policy's tool calls until an answer has none. A factory for ``rollout.workflow``.

    ``tools`` are import paths of functions (:data:`Tool`) with different names. Their JSON schemas come from
    :func:`transformers.utils.get_json_schema`. The prompts must be conversations. ``rollout.tool_parser`` reads the
    calls. The calls of a turn run at the same time, for at most ``timeout_s`` each. A wrong call, an error or a timeout
    is a result, which the policy reads. The run's reward function judges all text after the prompt, the tools' results
    included. Metrics are ``turns``, ``tool_calls`` and ``tool_errors``. Raises DataError for a tool that cannot be
    loaded or described, and for two tools of one name.
    """
    functions = _by_name([load_function(path, key="rollout.workflow_options.tools") for path in tools])
    schemas = [_schema(function) for function in functions.values()]

    async def converse(client: PolicyClient, prompt: Prompt) -> Trajectory:
        messages: list[dict[str, Any]] = list(_messages(prompt))
        trajectory = client.begin(client.chat.prompt(messages, tools=schemas))
        counts = {"turns": 0.0, "tool_calls": 0.0, "tool_errors": 0.0}
        while True:
            response = await trajectory.generate()
            counts["turns"] += 1
            answer = client.chat.read(response, tools=schemas)
            if not answer.tool_calls or response.truncated or counts["turns"] >= max_turns:
                cut = bool(answer.tool_calls)
                return trajectory.finish(metrics=counts, truncated=cut)
            at = len(messages)
            messages.append(_assistant(answer.content, answer.tool_calls))
            results = await asyncio.gather(*(_traced_run(functions, call, timeout_s) for call in answer.tool_calls))
            counts["tool_calls"] += len(results)
            counts["tool_errors"] += sum(failed for _, failed in results)
            for number, (text, _) in enumerate(results):
                name = answer.tool_calls[number].name
                messages.append({"role": "tool", "tool_call_id": f"call-{at}-{number}", "name": name, "content": text})
            follow = partial(ChatTokens.following, messages=messages, at=at, said=response.token_ids, tools=schemas)
            try:
                trajectory.add(await client.chat.off_loop(follow, characters=sum(len(text) for text, _ in results)))
                too_long = trajectory.room <= 0
            except TooLongError:
                too_long = True
            if too_long:
                return trajectory.finish(metrics=counts, truncated=True)

    return converse


def _by_name(functions: Sequence[Tool]) -> dict[str, Tool]:
    found = {function.__name__: function for function in functions}
    if len(found) < len(functions):
        raise DataError(
            "two tools have the same name",
            why=f"the tools are {', '.join(function.__name__ for function in functions)}; a call has only a name",
            fix="give each function another name",
        )
    return found


def _schema(function: Tool) -> dict[str, Any]:
    from transformers.utils import get_json_schema

    try:
        schema: dict[str, Any] = get_json_schema(function)
    except Exception as exc:
        raise DataError(
            f"the tool {function.__name__} cannot be described to the policy",
            why=message_of(exc),
            fix="give each parameter a type hint and a line in the docstring's Args: section",
        ) from exc
    return schema


def _messages(prompt: Prompt) -> Sequence[dict[str, Any]]:
    if prompt.messages is None:
        raise DataError(
            "a prompt is a text, and tools need a conversation",
            why=f"it is {prompt.text[:80]!r}",
            fix='write the row\'s prompt as messages: [{"role": "user", "content": …}]',
        )
    return prompt.messages


def _assistant(content: str, calls: Sequence[ToolCall]) -> dict[str, Any]:
    described = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in calls]
    return {"role": "assistant", "content": content, "tool_calls": described}


async def _traced_run(functions: dict[str, Tool], call: ToolCall, timeout_s: float) -> tuple[str, bool]:
    with traced("tool", tool=call.name) as attributes:
        text, attributes["failed"] = await _run(functions, call, timeout_s)
    return text, bool(attributes["failed"])


async def _run(functions: dict[str, Tool], call: ToolCall, timeout_s: float) -> tuple[str, bool]:
    """Return the result of ``call`` as text, and whether it is an error."""
    function = functions.get(call.name)
    if function is None:
        return f"error: there is no tool {call.name}; the tools are {', '.join(functions)}", True
    limit = asyncio.timeout(timeout_s)
    try:
        arguments = json.loads(call.arguments)
        async with limit:
            result = await call_maybe_async(function, **arguments)
        return result if isinstance(result, str) else json.dumps(result, default=str), False
    except BaseException as exc:  # a tool may raise anything, also a CancelledError of its own; the policy reads it
        if isinstance(exc, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise
        reason = f"the tool did not answer within {timeout_s:g} s" if limit.expired() else short_repr(exc)
        return f"error: {reason}", True
