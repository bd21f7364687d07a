"""The output of a run: files in the run directory, progress on the screen, and the summary at the end."""

from hwrl.run.report.curve import draw_curve
from hwrl.run.report.rates import StepRates
from hwrl.run.report.records import Metrics
from hwrl.run.report.run_report import CURVE, METRICS, PROMPTS, RunReport, read_metrics
from hwrl.run.report.views import LiveView, PlainView, View, make_view

__all__ = [
    "CURVE",
    "METRICS",
    "PROMPTS",
    "LiveView",
    "Metrics",
    "PlainView",
    "RunReport",
    "StepRates",
    "View",
    "draw_curve",
    "make_view",
    "read_metrics",
]
