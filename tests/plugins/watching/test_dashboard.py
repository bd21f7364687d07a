"""The dashboard for Grafana: it loads as Grafana's own types, and its queries name metrics that hwrl writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import hwrl_trackers
from hwrl_trackers.prometheus import metric_name

REPO = Path(__file__).parents[3]
FILE = Path(hwrl_trackers.__file__).with_name("grafana.json")
OF_RAY = {"ray_node_mem_used", "ray_node_mem_total", "ray_node_cpu_utilization", "ray_node_gpus_utilization"}


@cache
def dashboard() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def documented_metrics() -> Iterator[str]:
    """Yield the metrics in the table of ``docs/report.md``; ``/name`` continues the group of the one before."""
    page = (REPO / "docs/report.md").read_text(encoding="utf-8")
    group, table = "", page.partition("| metric | meaning |")[2].partition("\n\n")[0]
    for cell in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE):
        for name in re.findall(r"`([^`]*)`", cell):
            group = name.split("/")[0] if not name.startswith("/") else group
            yield name if not name.startswith("/") else group + name


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def test_every_query_names_metrics_of_a_run() -> None:
    known = {f"ray_{metric_name(name)}" for name in documented_metrics()} | OF_RAY
    named = {name for query in queries() for name in re.findall(r"\bray_\w+(?=[{ ]|$)", query)}
    assert len(named) > 25 and named <= known, sorted(named - known)
    patterns = re.findall(r'__name__=~"([^"]*)"', " ".join(queries()))
    names = [f"ray_{metric_name(name.replace('<', '').replace('>', ''))}" for name in documented_metrics()]
    assert patterns and all(any(re.fullmatch(pattern, name) for name in names) for pattern in patterns)


def test_panels_have_their_own_ids_and_places_and_a_meaning() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def assert_within(own: Any, known: Any, path: str = "dashboard") -> None:
    """Raise AssertionError if something of ``own`` is lost in ``known``, which Grafana's types have read from it."""
    if isinstance(own, dict):
        assert isinstance(known, dict) and own.keys() <= known.keys(), f"{path}: unknown {own.keys() - known.keys()}"
        for key, value in own.items():
            assert_within(value, known[key], f"{path}.{key}")
    elif isinstance(own, list):
        assert len(own) == len(known), path
        for index, value in enumerate(own):
            assert_within(value, known[index], f"{path}[{index}]")
    else:
        assert own == known, path


def through_grafana(content: dict[str, Any]) -> Any:
    pytest.importorskip("grafana_foundation_sdk", reason="Grafana's types are not installed: make test-stack-watching")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    return json.loads(JSONEncoder().encode(Dashboard.from_json(content)))


def test_the_dashboard_is_one_of_grafana() -> None:
    assert_within(dashboard(), through_grafana(dashboard()))


@pytest.mark.parametrize(
    "path", [("panels", 1, "titel"), ("templating", "list", 0, "querry"), ("panels", 1, "gridPos", "z")]
)
def test_the_check_finds_what_grafana_does_not_know(path: tuple[str | int, ...]) -> None:
    wrong = json.loads(FILE.read_text(encoding="utf-8"))
    place = wrong
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = "x"
    with pytest.raises(AssertionError, match=f"unknown.*{path[-1]}"):
        assert_within(wrong, through_grafana(wrong))
