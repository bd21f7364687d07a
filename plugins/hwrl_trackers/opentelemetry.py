"""Traces of prompts to OpenTelemetry: ``report.trackers=[opentelemetry]``; see ``docs/watching.md``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import hwrl
from hwrl.errors import ConfigError
from hwrl.interfaces import PromptTrace, RunStatus, Span, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker

OPTIONS = ("endpoint", "file", "service_name")
_SDK = ("opentelemetry.sdk.trace", "opentelemetry-sdk")
_EXPORTER = ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry-exporter-otlp-proto-http")
"""The needed module and its package: the SDK for a file, the exporter for a collector."""
_MOST_WAITING = 1000
"""Ended spans before a flush. The SDK drops spans if more than 2,048 wait to be sent."""


class OpenTelemetryTracker(Tracker):
    """A trace for each traced prompt, sent by OTLP over HTTP, or written to ``file``, a JSON object on each line.

    Without ``endpoint`` and ``file``, OpenTelemetry's environment variables name the collector.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._provider: Any = None
        self._tracer: Any = None
        self._waiting = 0
        self._at_end = ExitStack()

    def start(self, run: TrackedRun) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        if not run.config["report"]["trace_every"]:
            raise ConfigError(
                "report.trackers=opentelemetry has nothing to show",
                why="report.trace_every is 0, so no prompt is traced",
                fix="set report.trace_every=1, or to a higher number for one prompt of that many",
            )
        names = {"service.name": self._options.get("service_name", "hwrl"), "hwrl.run": run.name}
        self._provider = TracerProvider(resource=Resource.create({**names, "hwrl.run_id": run.run_id}))
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter()))
        self._at_end.callback(self._provider.shutdown)  # sends the rest; the file is closed after it
        self._tracer = self._provider.get_tracer("hwrl", hwrl.__version__)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Do nothing: other trackers show metrics."""

    def trace(self, traces: Sequence[PromptTrace]) -> None:
        from opentelemetry.trace import set_span_in_context

        for trace in traces:
            whole = Span("prompt", trace.begin_unix_s, trace.end_unix_s, trace.attributes)
            root = self._begin(whole, {"sequence_number": trace.sequence_number}, context=None)
            inside = set_span_in_context(root)
            for span in trace.spans:
                self._begin(span, {}, context=inside).end(_ns(span.end_unix_s))
                self._send_if_many()
            root.end(_ns(whole.end_unix_s))
            self._send_if_many()

    def finish(self, status: RunStatus) -> None:
        self._at_end.close()

    def _send_if_many(self) -> None:
        """Count an ended span, and send all ended ones if many wait. Blocks until they are sent."""
        self._waiting += 1
        if self._waiting >= _MOST_WAITING:
            self._provider.force_flush()
            self._waiting = 0

    def _begin(self, span: Span, more: Mapping[str, int], *, context: Any) -> Any:
        attributes = {f"hwrl.{name}": value for name, value in {**span.attributes, **more}.items()}
        return self._tracer.start_span(
            span.name, context=context, attributes=attributes, start_time=_ns(span.begin_unix_s)
        )

    def _exporter(self) -> Any:
        if "file" in self._options:
            from opentelemetry.sdk.trace.export import ConsoleSpanExporter

            file = Path(self._options["file"]).open("a", encoding="utf-8")  # noqa: SIM115 - finish closes it
            self._at_end.enter_context(file)
            return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(endpoint=self._options.get("endpoint"))


def _ns(unix_s: float) -> int:
    return int(unix_s * 10**9)


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    module, package = _SDK if "file" in options else _EXPORTER
    check_tracker("opentelemetry", options, known=OPTIONS, module=module, package=package)
    if {"endpoint", "file"} <= options.keys():
        raise ConfigError(
            "report.tracker_options.opentelemetry has two places for traces",
            why=f"endpoint={options['endpoint']!r} and file={options['file']!r}, and traces go to one of them",
            fix="remove endpoint, or file",
        )
    return OpenTelemetryTracker(options)
