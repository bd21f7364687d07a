"""Complete the traces of a step's prompts: add the wait in the ledger and the training step to the replicas' spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hwrl.interfaces import PromptTrace, Span


@dataclass(frozen=True)
class StepTimes:
    """A training step: its number, the weight version before it, and its start and end in seconds since 1970.

    ``published`` is the version that the step sent; None if it sent no version. The transfer took ``sync_s`` seconds,
    and the critic's training after it took ``critic_s``.
    """

    step: int
    version: int
    begin_unix_s: float
    end_unix_s: float
    published: int | None = None
    sync_s: float = 0.0
    critic_s: float = 0.0


def finish_traces(spans: Mapping[int, Sequence[Span]], times: StepTimes) -> Iterator[PromptTrace]:
    """Yield the trace of each traced prompt of a step. ``spans`` has the replicas' spans by sequence number.

    The span ``batch`` lasts from the end of the rollout to the start of the step. If the machines' clocks differ by
    more than this time, its length is 0.
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
