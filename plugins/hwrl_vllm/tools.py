"""vLLM's parsers find the tool calls in the policy's text."""

from __future__ import annotations

from typing import Any

from hwrl.errors import UnsupportedError
from hwrl.interfaces import ParsedAnswer, ToolCall, ToolParser, Tools


def vllm_tool_parser(name: str, tokenizer: Any) -> ToolParser:
    """Return vLLM's parser ``name``. Raises UnsupportedError if vLLM has none, or if it cannot use ``tokenizer``."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        kind = ToolParserManager.get_tool_parser(name)
        kind(tokenizer)
    except Exception as exc:
        known = ", ".join(ToolParserManager.list_registered())
        raise UnsupportedError(
            f"vLLM's parser of tool calls {name!r} cannot be used",
            why="vLLM has none of that name" if isinstance(exc, KeyError) else f"vLLM: {exc}",
            fix=f"set rollout.tool_parser to one for this model: {known}",
        ) from exc

    def parse(text: str, tools: Tools) -> ParsedAnswer:
        request = ChatCompletionRequest(model="policy", messages=[], tools=[dict(tool) for tool in tools])
        parser = kind(tokenizer, request.tools)  # a new one for each text, because a parser keeps state
        found = parser.extract_tool_calls(text, request)
        if not found.tools_called:
            return ParsedAnswer(text)
        calls = tuple(ToolCall(call.function.name, call.function.arguments) for call in found.tool_calls)
        return ParsedAnswer(found.content or "", calls)

    return parse
