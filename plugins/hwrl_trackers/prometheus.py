"""Metrics to Prometheus, through Ray's metrics: ``report.trackers=[prometheus]``; see ``docs/watching.md``."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from typing import Any

import hwrl
from hwrl.checkpoint import DurableFS
from hwrl.interfaces import RunStatus, TrackedRun, Tracker
from hwrl_trackers.options import check_tracker

TARGETS = "prometheus.json"
"""The file in the run directory with the addresses to scrape, as Prometheus reads it (``file_sd_configs``)."""
PREFIX = "hwrl_"


def metric_name(name: str) -> str:
    """Return the name of a run's metric in Prometheus, where Ray adds ``ray_`` in front.

    A name with characters beyond ASCII ends in a checksum, because its letters are lost.

    >>> metric_name("eval/pass@4")
    'hwrl_eval_pass_4'
    >>> metric_name("reward/准确率")
    'hwrl_reward__5c739f73'
    """
    return _plain(name) if name.isascii() else _checked(name)


class MetricNames:
    """Gives each metric of a run a name of its own in Prometheus."""

    def __init__(self) -> None:
        self._metrics: dict[str, str] = {}  # by their names in Prometheus

    def of(self, name: str) -> str:
        """Return ``metric_name(name)``, with a checksum if another metric has this name already."""
        usual = metric_name(name)
        chosen = usual if self._metrics.setdefault(usual, name) == name else _checked(name)
        self._metrics[chosen] = name
        return chosen


def _plain(name: str) -> str:
    return PREFIX + re.sub(r"[^a-zA-Z0-9_]+", "_", name)


def _checked(name: str) -> str:
    return f"{_plain(name)}_{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"


def scrape_targets(nodes: list[dict[str, Any]], *, run: TrackedRun) -> list[dict[str, Any]]:
    """Return the content of :data:`TARGETS` for Ray's ``nodes``: the live ones that export metrics."""
    addresses = [
        f"{node['NodeManagerAddress']}:{node['MetricsExportPort']}"
        for node in nodes
        if node["Alive"] and node["MetricsExportPort"] > 0  # 0: not yet known; -1: Ray collects no metrics
    ]
    return [{"targets": sorted(addresses), "labels": {"hwrl_run": run.name}}]


class PrometheusTracker(Tracker):
    """Gauges of Ray, one for each metric, with the tags ``run`` and ``run_id``. They hold the newest step's values.

    Ray's agent on the driver's node exports them; Prometheus collects them there. Each step updates the file of
    targets, because nodes join and leave, and Ray learns a new node's port only later.
    """

    _run: TrackedRun

    def __init__(self) -> None:
        self._gauges: dict[str, Any] = {}
        self._names = MetricNames()
        self._tags: dict[str, str] = {}
        self._targets = ""

    def start(self, run: TrackedRun) -> None:
        self._run, self._tags = run, {"run": run.name, "run_id": run.run_id}
        self._write_targets()

    def log(self, metrics: Mapping[str, float], *, step: int) -> None:
        for name, value in {**metrics, "step": float(step)}.items():
            self._gauge(name).set(float(value), tags=self._tags)
        self._write_targets()

    def finish(self, status: RunStatus) -> None:
        """Do nothing: Ray ends the export with the driver."""

    def _write_targets(self) -> None:
        import ray

        targets = json.dumps(scrape_targets(ray.nodes(), run=self._run), indent=2)
        if targets != self._targets:
            DurableFS().replace_file(self._run.directory / TARGETS, targets.encode())
            self._targets = targets

    def _gauge(self, name: str) -> Any:
        if name not in self._gauges:
            from ray.util.metrics import Gauge

            keys = tuple(self._tags)
            self._gauges[name] = Gauge(self._names.of(name), description=f"hwrl: {name}", tag_keys=keys)
        return self._gauges[name]


@hwrl.hookimpl
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    check_tracker("prometheus", options, known=(), module="prometheus_client", package="'ray[default]'")
    return PrometheusTracker()
