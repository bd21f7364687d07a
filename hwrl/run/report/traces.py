"""The traces of a step's prompts: the replicas' spans, then the wait in the ledger and the training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hwrl.interfaces import PromptTrace, Span


@dataclass(frozen=True)
class StepTimes:
    """A training step: its number, the weight version before it, and its begin and end in seconds since 1970.

    ``published`` is the version that the step has sent; None if it sent none. The transfer took ``sync_s`` seconds, and
    the critic's training after that ``critic_s``.
    """

    step: int
    version: int
    begin_unix_s: float
    end_unix_s: float
    published: int | None = None
    sync_s: float = 0.0
    critic_s: float = 0.0


def finish_traces(spans: Mapping[int, Sequence[Span]], times: StepTimes) -> Iterator[PromptTrace]:
    """Yield the trace of each traced prompt of a step; ``spans`` has the replicas' spans by sequence number.

    ``batch`` is the time between the end of the rollout and the begin of the step. If clocks of machines differ by
    more than that, it has no length.
    """
    step = {"step": times.step, "version": times.version}
    for number, before in spans.items():
        handed_in_unix_s = min(max(span.end_unix_s for span in before), times.begin_unix_s)
        after = [
            Span("batch", handed_in_unix_s, times.begin_unix_s),
            Span("step", times.begin_unix_s, times.end_unix_s, step),
        ]
        if times.published is not None:
            sent_unix_s = times.end_unix_s - times.critic_s
            began_unix_s = max(times.begin_unix_s, sent_unix_s - times.sync_s)
            after.append(Span("version", began_unix_s, sent_unix_s, {"version": times.published}))
        ordered = sorted(before, key=lambda span: span.begin_unix_s)
        yield PromptTrace(number, times.step, (*ordered, *after), step)
