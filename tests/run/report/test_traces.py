"""A prompt's trace from the replica's spans to the tracker: the ledger's actor, the step's own spans, the report."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hwrl.interfaces import Span
from hwrl.run.report.steps import finish_traces

SPANS = (Span("lease", 10.0, 11.0), Span("generate", 11.0, 13.0, {"sample": 0}), Span("reward", 13.0, 14.0))
TRAINED = {"timing_s/sync": 1.5, "timing_s/critic": 0.5}
TIMES: Any = {"step": 3, "every": 1, "begin_unix_s": 20.0, "end_unix_s": 26.0}


def test_a_trace_ends_with_the_wait_the_step_and_the_version() -> None:
    (trace,) = finish_traces({7: SPANS}, TRAINED, **TIMES)
    assert (trace.sequence_number, trace.step, trace.attributes) == (7, 3, {"step": 3, "version": 2})
    assert trace.spans[:3] == SPANS
    assert trace.spans[3:] == (
        Span("batch", 14.0, 20.0),
        Span("step", 20.0, 26.0, {"step": 3, "version": 2}),
        Span("version", 24.0, 25.5, {"version": 3}),
    )
    assert (trace.begin_unix_s, trace.end_unix_s) == (10.0, 26.0)


def test_a_step_that_sends_nothing_has_no_version() -> None:
    (trace,) = finish_traces({7: SPANS}, TRAINED, **{**TIMES, "every": 2})
    assert [span.name for span in trace.spans][3:] == ["batch", "step"] and trace.attributes["version"] == 1


def test_no_span_is_negative_if_a_replicas_clock_is_ahead() -> None:
    ahead = [replace(span, begin_unix_s=span.begin_unix_s + 100, end_unix_s=span.end_unix_s + 100) for span in SPANS]
    (trace,) = finish_traces({7: ahead}, TRAINED, **TIMES)
    assert all(span.begin_unix_s <= span.end_unix_s for span in trace.spans)
