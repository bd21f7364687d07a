"""Metrics for Prometheus: names, the file of targets, and what a real Ray exports."""

from __future__ import annotations

import contextlib
import json
import re
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hwrl.errors import ConfigError, EngineError
from hwrl.interfaces import TrackedRun
from hwrl.run.cluster.ray_session import ray_cluster
from hwrl.run.config import load_config
from hwrl.run.demo import write_demo
from hwrl_trackers.prometheus import TARGETS, MetricNames, hwrl_tracker, metric_name, scrape_targets

NEEDED = "Ray exports metrics only as ray[default]: make test-stack-watching"
RUN = TrackedRun("0" * 32, "sorting", Path("/nowhere"), {})


@pytest.mark.parametrize("name", ["reward/mean", "eval/pass@4", "eval/two words/reward", "9/ä"])
def test_a_metric_has_a_name_that_prometheus_takes(name: str) -> None:
    assert re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", metric_name(name))


def test_each_metric_of_a_run_has_a_name_of_its_own() -> None:
    names = ["reward/准确率", "reward/长度", "my/a.b", "my/a_b", "my/a/b", "reward/mean", "reward/épée"]
    of_run, again = MetricNames(), MetricNames()
    mine = {name: of_run.of(name) for name in names}
    assert len(set(mine.values())) == len(names)
    assert all(re.fullmatch("hwrl_[a-zA-Z0-9_]*", name) for name in mine.values())
    assert (mine["reward/mean"], mine["my/a.b"]) == ("hwrl_reward_mean", "hwrl_my_a_b"), "the usual names stay plain"
    assert {name: of_run.of(name) for name in reversed(names)} == mine, "a metric keeps its name"
    for name in ("reward/长度", "reward/准确率"):
        assert again.of(name) == mine[name], "whatever came first"


def test_the_targets_are_the_live_nodes_that_export() -> None:
    def node(address: str, port: int, *, alive: bool = True) -> dict[str, Any]:
        return {"NodeManagerAddress": address, "MetricsExportPort": port, "Alive": alive}

    nodes = [node("10.0.0.1", 8080), node("10.0.0.2", 8080, alive=False), node("10.0.0.3", -1), node("10.0.0.4", 0)]
    assert scrape_targets(nodes, run=RUN) == [{"targets": ["10.0.0.1:8080"], "labels": {"hwrl_run": "sorting"}}]


def test_a_ray_without_its_export_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(EngineError, match=r"(?s)prometheus_client is not installed.*pip install 'ray\[default\]'"):
        hwrl_tracker(options={})


def test_an_option_is_an_error_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found")
    with pytest.raises(ConfigError, match="it has no options"):
        hwrl_tracker(options={"port": 8080})


def scrape(targets: Path) -> dict[str, float]:
    """Return the values of hwrl's metrics for the run of the test, at the addresses in the file ``targets``."""
    lines: list[str] = []
    ((*addresses,),) = (one["targets"] for one in json.loads(targets.read_text()))
    for address in addresses:
        with (
            contextlib.suppress(OSError),  # the agent is not up yet
            urllib.request.urlopen(f"http://{address}/metrics", timeout=500.0) as answer,
        ):
            lines += answer.read().decode().splitlines()
    found = (re.fullmatch(r'(ray_hwrl_\w+)\{.*\brun="sorting".*\} (\S+)', line) for line in lines)
    return {match[1]: float(match[2]) for match in found if match}


def test_ray_exports_the_newest_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("prometheus_client", reason=NEEDED)
    monkeypatch.setenv("RAY_metrics_report_interval_ms", "200")
    config = load_config(write_demo(tmp_path, seed=1, prompts=16), [])
    with ray_cluster(config, log=print):
        tracker = hwrl_tracker(options={})
        tracker.start(TrackedRun("0" * 32, "sorting", tmp_path, {}))
        tracker.log({"reward/mean": 0.25}, step=1)
        wanted = {"ray_hwrl_reward_mean": 0.5, "ray_hwrl_step": 2.0}
        deadline_s = time.monotonic() + 300.0
        while (got := scrape(tmp_path / TARGETS)) != wanted:
            assert time.monotonic() < deadline_s, got
            tracker.log({"reward/mean": 0.5}, step=2)
            time.sleep(0.2)
        tracker.finish("finished")
