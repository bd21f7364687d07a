"""Metrics to trackio: ``report.trackers=[trackio]``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import hwrl
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker

OPTIONS = ("auto_log_cpu", "auto_log_gpu", "bucket_id", "group", "name", "private", "project", "server_url", "space_id")
"""Arguments of ``trackio.init``."""


class TrackioTracker(Tracker):
    """A run of trackio. A resume finds it by its name, so the name contains a part of hwrl's run id."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        import trackio

        arguments = {"project": "hwrl", "name": f"{run.name}-{run.run_id[:8]}", **self._options}
        self._run = trackio.init(config=dict(run.config), resume="allow", embed=False, **arguments)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def finish(self, status: RunStatus) -> None:
        self._run.finish()


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    check_tracker("trackio", options, known=OPTIONS)
    return TrackioTracker(options)
