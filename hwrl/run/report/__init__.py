"""The output of a run: files in the run directory, progress on the screen, trackers, and the summary at the end."""

from hwrl.run.report.records import Metrics, read_lines
from hwrl.run.report.run_report import METRICS, MODEL_DIRECTORY, PROMPTS, RunReport, read_metrics
from hwrl.run.report.samples import SAMPLES, Sample, pick_samples
from hwrl.run.report.steps import StepRates, StepRecorder
from hwrl.run.report.views import EVENTS, PlainView, RecordedView, make_view

__all__ = [
    "EVENTS",
    "METRICS",
    "MODEL_DIRECTORY",
    "PROMPTS",
    "SAMPLES",
    "Metrics",
    "PlainView",
    "RecordedView",
    "RunReport",
    "Sample",
    "StepRates",
    "StepRecorder",
    "make_view",
    "pick_samples",
    "read_lines",
    "read_metrics",
]
