"""The built-in parser of tool calls in the policy's text."""

from __future__ import annotations

import json

from hwrl.interfaces import ParsedAnswer, ToolCall, Tools

HERMES = "hermes"
"""The built-in form's name: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as many models write calls."""
_BEGIN, _END, _THOUGHT = "<tool_call>", "</tool_call>", "</think>"


def parse_tool_calls(text: str, tools: Tools = ()) -> ParsedAnswer:
    """Return the calls in ``text``. Calls inside its reasoning, before ``</think>``, do not count.

    The content is the text before the first call. If a call is damaged, there are no calls, and all text is content.

    >>> parse_tool_calls('Let me see. <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>')
    ParsedAnswer(content='Let me see. ', tool_calls=(ToolCall(name='add', arguments='{"a": 1}'),))
    >>> parse_tool_calls('<tool_call>{"name": "add"')
    ParsedAnswer(content='<tool_call>{"name": "add"', tool_calls=())
    """
    reasoning, thought, said = text.partition(_THOUGHT)
    content, found, rest = (said if thought else text).partition(_BEGIN)
    calls = []
    while found:
        call, rest = _first_call(rest)
        if call is None:
            return ParsedAnswer(text)
        calls.append(call)
        _, found, rest = rest.partition(_BEGIN)
    return ParsedAnswer(reasoning + thought + content if thought else content, tuple(calls))


def _first_call(text: str) -> tuple[ToolCall | None, str]:
    """Return the call at the start of ``text``, and the text after it; None for the call if it is damaged."""
    text = text.lstrip()
    try:
        call, end = json.JSONDecoder().raw_decode(text)
        is_call = isinstance(call, dict) and isinstance(call.get("name"), str)
        arguments = call.get("arguments", {}) if is_call else None
        written = json.dumps(arguments, ensure_ascii=False)
    except (ValueError, RecursionError):  # what can just be read may be too deep to be written
        return None, text
    rest = text[end:].lstrip()
    if not isinstance(arguments, dict) or not rest.startswith(_END):
        return None, text
    return ToolCall(call["name"], written), rest.removeprefix(_END)
