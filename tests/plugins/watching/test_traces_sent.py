"""Traces through OpenTelemetry's real SDK: to a file, and by OTLP to a collector over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hwrl.errors import ConfigError
from hwrl.interfaces import PromptTrace, Span, TrackedRun
from hwrl_trackers.opentelemetry import hwrl_tracker

SDK = "opentelemetry's SDK is not installed: make test-stack-watching"
SPANS = (
    Span("lease", 100.0, 100.5, {"replica": "replica-0"}),
    Span("generate", 100.5, 103.25, {"sample": 1, "tokens": 7, "truncated": False}),
    Span("step", 104.0, 106.0),
)
TRACES = [PromptTrace(number, 3, SPANS, {"step": 3, "version": 2}) for number in (5, 6)]
NAMES = ["generate", "lease", "prompt", "step"]


def send(directory: Path, trace_every: int = 1, traces: Sequence[PromptTrace] = TRACES, **options: Any) -> None:
    run = TrackedRun("0" * 32, "sorting", directory, {"report": {"trace_every": trace_every}})
    tracker = hwrl_tracker(options=options)
    tracker.start(run)
    tracker.log({"reward/mean": 0.5}, step=3)
    tracker.trace(traces)
    tracker.finish("finished")


def test_a_file_gets_each_prompt_as_one_trace(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=SDK)
    send(tmp_path, file=str(tmp_path / "traces.jsonl"))
    spans = [json.loads(line) for line in (tmp_path / "traces.jsonl").read_text().splitlines()]
    roots = {span["context"]["trace_id"]: span for span in spans if span["name"] == "prompt"}
    assert sorted(root["attributes"]["hwrl.sequence_number"] for root in roots.values()) == [5, 6]
    for trace_id, root in roots.items():
        own = {span["name"]: span for span in spans if span["context"]["trace_id"] == trace_id}
        assert sorted(own) == NAMES
        assert all(own[name]["parent_id"] == root["context"]["span_id"] for name in NAMES if name != "prompt")
        assert own["generate"]["attributes"] == {"hwrl.sample": 1, "hwrl.tokens": 7, "hwrl.truncated": False}
        assert own["generate"]["start_time"] == "1970-01-01T00:01:40.500000Z"
        assert (root["start_time"], root["end_time"]) == ("1970-01-01T00:01:40.000000Z", "1970-01-01T00:01:46.000000Z")
        assert root["resource"]["attributes"]["hwrl.run"] == "sorting"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Yield the address of a collector, and the list of the spans that it gets."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[Any] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            got.extend(span for one in request.resource_spans for scope in one.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces", got
        finally:
            server.shutdown()
            thread.join()


def test_a_collector_gets_every_span_before_the_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=SDK)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    with collector() as (address, got):
        send(tmp_path, endpoint=address)
    assert sorted(span.name for span in got) == sorted(NAMES * 2) and len({span.trace_id for span in got}) == 2


def test_no_span_of_a_step_with_many_is_lost(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=SDK)
    traces = [
        PromptTrace(0, 1, SPANS[1:2] * 3999, {}),
        *(PromptTrace(number, 1, SPANS, {}) for number in range(1, 251)),
    ]
    send(tmp_path, traces=traces, file=str(tmp_path / "traces.jsonl"))
    assert len((tmp_path / "traces.jsonl").read_text().splitlines()) == 5000


def test_a_file_beside_a_collector_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=SDK)
    with pytest.raises(ConfigError, match=r"(?s)two places for traces.*remove endpoint, or file"):
        send(tmp_path, file=str(tmp_path / "traces.jsonl"), endpoint="http://127.0.0.1:1/v1/traces")


def test_a_run_that_traces_nothing_says_so(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason=SDK)
    with pytest.raises(ConfigError, match=r"(?s)no prompt is traced.*report\.trace_every=1"):
        send(tmp_path, trace_every=0, file=str(tmp_path / "traces.jsonl"))
