"""The output of a run: files in the run directory, progress on the screen, trackers, and the summary at the end."""

from hwrl.run.report.records import Metrics as Metrics
from hwrl.run.report.records import read_lines as read_lines
from hwrl.run.report.run_report import METRICS as METRICS
from hwrl.run.report.run_report import MODEL_DIRECTORY as MODEL_DIRECTORY
from hwrl.run.report.run_report import PROMPTS as PROMPTS
from hwrl.run.report.run_report import read_metrics as read_metrics
from hwrl.run.report.steps import StepRecorder as StepRecorder
from hwrl.run.report.views import PlainView as PlainView
from hwrl.run.report.views import RecordedView as RecordedView
from hwrl.run.report.views import make_view as make_view
