"""Messages of the policy, parsed from its text: :class:`ParsedAnswer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class ToolCall:
    """The policy's call of the function ``name``; ``arguments`` is a JSON object as text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class ParsedAnswer:
    """A message of the policy: the text for the reader, and its tool calls in order."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


Tools: TypeAlias = Sequence[Mapping[str, Any]]
"""Tools that the policy may call, each as OpenAI describes it: ``{"type": "function", "function": {"name": …}}``."""
ToolParser: TypeAlias = Callable[[str, Tools], ParsedAnswer]
"""Parses the policy's text. All but well-formed calls is content, so it never raises. Any thread may call it."""
