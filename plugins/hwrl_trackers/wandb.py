"""Metrics to Weights & Biases: ``report.trackers=[wandb]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hwrl
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker

OPTIONS = ("dir", "entity", "group", "job_type", "mode", "name", "notes", "project", "tags")
"""Arguments of ``wandb.init``."""


class WandbTracker(Tracker):
    """A run of Weights & Biases under hwrl's run id. A resume continues it."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        import wandb

        arguments = {"project": "hwrl", "name": run.name, "dir": str(run.directory), **self._options}
        self._run = wandb.init(id=run.run_id, resume="allow", config=dict(run.config), **arguments)
        # The service drops values of a step below its newest one. So the step is a metric, and the axis of the others.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log({**metrics, "step": step})

    def finish(self, status: RunStatus) -> None:
        self._run.finish(exit_code=1 if status == "failed" else 0)


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    check_tracker("wandb", options, known=OPTIONS)
    return WandbTracker(options)
