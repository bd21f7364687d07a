"""The spans of a prompt in its replica: generation calls, tools, the reward."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

from hwrl.interfaces import Response, Span
from hwrl.interfaces.tracing import Attribute


class SpanLog:
    """Notes the spans of one traced prompt, each with ``attributes``. Any thread may call it.

    :meth:`of_sample` returns a log for one sample. Its spans go into this log, too.
    """

    def __init__(self, **attributes: Attribute) -> None:
        self._attributes = attributes
        self._spans: list[Span] = []
        self.began_unix_s = time.time()
        """When the log was made, in seconds since 1970."""

    def of_sample(self, index: int) -> SpanLog:
        """Return a log whose spans name the sample ``index`` and are in this log."""
        log = SpanLog(**self._attributes, sample=index)
        log._spans = self._spans
        return log

    def add(
        self, name: str, attributes: Mapping[str, Attribute], *, begin_unix_s: float, end_unix_s: float | None = None
    ) -> None:
        """Note a span; without ``end_unix_s`` it ends now. Times are seconds since 1970."""
        end = time.time() if end_unix_s is None else end_unix_s
        self._spans.append(Span(name, begin_unix_s, end, {**self._attributes, **attributes}))

    def add_generation(self, response: Response, begin_unix_s: float) -> None:
        """Note a call of the engine that returned ``response`` now."""
        versions = response.versions
        known = {"version_min": int(versions.min()), "version_max": int(versions.max())} if len(versions) else {}
        made = {"tokens": len(response.token_ids), "truncated": bool(response.truncated), **known}
        self.add("generate", made, begin_unix_s=begin_unix_s)

    def spans(self) -> tuple[Span, ...]:
        """Return all spans so far."""
        return tuple(self._spans)


current_log: ContextVar[SpanLog | None] = ContextVar("hwrl_spans", default=None)
"""The log of this task, and of tasks that it starts later; None if its prompt is not traced."""


@contextmanager
def traced(name: str, **attributes: Attribute) -> Iterator[dict[str, Attribute]]:
    """Note the block as a span of the present workflow's prompt, also if the block raises.

    For workflows and their tools. Yields a dict; the block may add attributes to it. Does nothing outside of a
    workflow, and for a prompt that is not traced (``report.trace_every``).
    """
    log, begin_unix_s = current_log.get(), time.time()
    try:
        yield attributes
    finally:
        if log is not None:
            log.add(name, attributes, begin_unix_s=begin_unix_s)
