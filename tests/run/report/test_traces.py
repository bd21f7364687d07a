"""A prompt's trace from the replica's spans to the tracker: the ledger's actor, the step's own spans, the report."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.interfaces import PromptGroup, PromptTrace, Response, RunStatus, Span, TrackedRun, Tracker
from hwrl.run.config import parse_config
from hwrl.run.ledger import BatchInfo, LedgerActor
from hwrl.run.report.run_report import RunReport
from hwrl.run.report.steps import finish_traces
from hwrl.run.report.trackers import TrackerThread
from tests.support.single_turns import join_responses

SPANS = (Span("lease", 10.0, 11.0), Span("generate", 11.0, 13.0, {"sample": 0}), Span("reward", 13.0, 14.0))
TRAINED = {"timing_s/sync": 1.5, "timing_s/critic": 0.5}
TIMES: Any = {"step": 3, "every": 1, "begin_unix_s": 20.0, "end_unix_s": 26.0}


class Traced(Tracker):
    """Keeps the traces."""

    def __init__(self) -> None:
        self.traces: list[PromptTrace] = []

    def start(self, run: TrackedRun) -> None: ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def trace(self, traces: Sequence[PromptTrace]) -> None:
        self.traces += traces

    def finish(self, status: RunStatus) -> None: ...


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


def group_of(sequence_number: int, lease_id: int, spans: tuple[Span, ...]) -> PromptGroup:
    tokens = np.array([0], dtype=np.int32)
    group = join_responses(
        [Response(tokens, tokens.astype(np.float32), tokens, truncated=False)] * 2,
        sequence_number=sequence_number,
        lease_id=lease_id,
        incarnation=0,
        prompt_ids=tokens,
        rewards=[0.0, 1.0],
        metrics={},
    )
    return replace(group, spans=spans)


def test_the_ledger_tells_the_spans_of_the_traced_prompts_of_a_batch() -> None:
    config = parse_config(
        {"dir": "run", "model": {"path": "m"}, "data": {"train": "t"}, "reward": {"function": "m:f"},
         "train": {"steps": 2, "batch_groups": 2}}
    )  # fmt: skip

    async def scene() -> BatchInfo | None:
        actor = LedgerActor(config)
        request = asyncio.create_task(actor.advance_and_take(2, 0))
        await asyncio.sleep(0)
        leases = await actor.lease(2, "a#0")
        groups = [group_of(lease.sequence_number, lease.lease_id, SPANS[: lease.lease_id]) for lease in leases]
        await actor.complete(groups, "a#0", {})
        return (await request)[1]

    info = asyncio.run(scene())
    assert info is not None and info.sequence_numbers == [0, 1] and info.spans == {1: SPANS[:1]}


def test_the_report_hands_traces_to_each_tracker(tmp_path: Path) -> None:
    tracker = Traced()
    run = TrackedRun("0" * 32, "sorting", tmp_path, {}, 0)
    thread = TrackerThread("mine", lambda: tracker, run, log=pytest.fail)
    report = RunReport(tmp_path, log=pytest.fail, trackers=[thread])
    report.trace(traces := list(finish_traces({7: SPANS}, TRAINED, **TIMES)))
    report.close("interrupted")
    assert tracker.traces == traces
