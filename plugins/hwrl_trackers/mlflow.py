"""Metrics to MLflow: ``report.trackers=[mlflow]``."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import hwrl
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker

OPTIONS = ("experiment", "name", "tags", "tracking_uri")
RUN_ID_TAG = "hwrl.run_id"
_STATUS = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
_MOST_IN_A_CALL = 100
_MOST_CHARACTERS = 500


def accepted_name(name: str) -> str:
    """Return ``name`` with ``_`` for each character that MLflow refuses in the name of a metric or parameter.

    >>> accepted_name("eval/pass@4")
    'eval/pass_4'
    """
    return re.sub(r"[^\w/.\- ]", "_", name)


class MlflowTracker(Tracker):
    """A run in an MLflow experiment, ``hwrl`` by default. A resumed run is found by the tag ``hwrl.run_id``."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options
        self._client: Any = None
        self._run_id = ""

    def start(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=self._options.get("tracking_uri"))
        experiment = self._experiment(self._options.get("experiment", "hwrl"))
        found = self._client.search_runs([experiment], filter_string=f"tags.`{RUN_ID_TAG}` = '{run.run_id}'")
        if found:
            self._run_id = found[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
            return
        tags = {**self._options.get("tags", {}), RUN_ID_TAG: run.run_id}
        name = self._options.get("name", run.name)
        self._run_id = self._client.create_run(experiment, tags=tags, run_name=name).info.run_id
        self._log_settings(run.config)

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = time.time_ns() // 10**6
        points = [Metric(accepted_name(name), float(value), now_ms, step) for name, value in metrics.items()]
        for start in range(0, len(points), _MOST_IN_A_CALL):
            self._client.log_batch(self._run_id, metrics=points[start : start + _MOST_IN_A_CALL])

    def finish(self, status: RunStatus) -> None:
        self._client.set_terminated(self._run_id, status=_STATUS[status])

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return str(self._client.create_experiment(name) if found is None else found.experiment_id)

    def _log_settings(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        settings = [Param(accepted_name(key), str(value)[:_MOST_CHARACTERS]) for key, value in _flat(config)]
        for start in range(0, len(settings), _MOST_IN_A_CALL):
            self._client.log_batch(self._run_id, params=settings[start : start + _MOST_IN_A_CALL])


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    check_tracker("mlflow", options, known=OPTIONS, package="mlflow-skinny")
    return MlflowTracker(options)
