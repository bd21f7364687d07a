"""The trace of a prompt: what happened to it, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

Attribute: TypeAlias = str | int | float | bool
Attributes: TypeAlias = Mapping[str, Attribute]


@dataclass(frozen=True)
class Span:
    """A stretch of time in the life of a prompt, for instance a call of a tool.

    Both times are seconds since 1970 (UTC), by the clock of the machine where it happened. ``name`` comes from a small
    fixed set; ``attributes`` has the details.
    """

    name: str
    begin_unix_s: float
    end_unix_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True)
class PromptTrace:
    """The life of one trained prompt, from its lease to the training step that used it.

    ``sequence_number`` is the prompt's place in the stream; ``step`` is the training step, counted from 1. ``spans``
    are in the order of their begin. They overlap: the samples of a prompt are generated side by side.
    """

    sequence_number: int
    step: int
    spans: tuple[Span, ...]
    attributes: Attributes = field(default_factory=dict)

    @property
    def begin_unix_s(self) -> float:
        """The begin of the first span, in seconds since 1970."""
        return min(span.begin_unix_s for span in self.spans)

    @property
    def end_unix_s(self) -> float:
        """The end of the last span, in seconds since 1970."""
        return max(span.end_unix_s for span in self.spans)
