"""Show what went wrong in a run, as HTML: counts of faults, and the run's log."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from hwrl.run import read_lines
from hwrl_report.columns import MetricColumns
from hwrl_report.markup import element, escaped, number

MAX_EVENTS = 1000
MAX_FAILED = 200
_KEPT_KINDS = ("start", "replica", "trainer", "scale", "error", "end")
"""The kinds of events that the page keeps if there are too many events."""


def render_faults(columns: MetricColumns, events: list[dict[str, Any]], prompts: Path) -> str:
    """Return the counts of faults, the metrics that were not finite, the failed prompts, and the log, as HTML.

    ``prompts`` is the path of ``trained_prompts.jsonl``.
    """
    counts = "".join(_count(name, value) for name, value in count_faults(columns, events).items())
    return element("dl", counts, class_="tiles") + _not_finite(columns) + _failed(prompts) + _log(events)


def count_faults(columns: MetricColumns, events: list[dict[str, Any]]) -> dict[str, float]:
    """Return how many times each fault happened in the whole run, including the time before a resume."""
    kinds = Counter(str(event.get("kind")) for event in events)
    faults: dict[str, float] = {
        "trainer restarts": kinds["trainer"],
        "replicas replaced": kinds["replica"],
        "resumes": max(0, kinds["start"] - 1),
        "errors that ended the run": kinds["error"],
        "replicas excluded from a transfer": columns.total("sync/excluded"),
        "errors of the reward function": columns.total("rollout/reward_errors"),
    }
    for name in sorted(columns.values):
        group, _, fault = name.partition("/")
        if group == "ledger" and fault.startswith(("failures", "expired", "rejected", "filtered", "failed", "skipped")):
            faults[_WORDS.get(fault, f"prompts: {fault.replace('_', ' ')}")] = columns.added(name)
    return faults


_WORDS = {
    "failures": "failed attempts at prompts",
    "expired": "prompts taken back from stuck replicas",
    "rejected": "groups rejected because of their weights",
    "filtered": "prompts filtered",
    "failed": "prompts given up",
}


def _count(name: str, value: float) -> str:
    return element(
        "div", element("dt", escaped(name)) + element("dd", number(value)), class_="bad" if value else "good"
    )


def _not_finite(columns: MetricColumns) -> str:
    found = []
    for name, values in sorted(columns.values.items()):
        wrong = columns.steps[name][~np.isfinite(values)]
        if len(wrong):
            found.append(f"<code>{escaped(name)}</code> in {len(wrong):,} steps, first in step {wrong[0]}")
    return element("p", f"Not finite: {'; '.join(found)}.", class_="warn") if found else ""


def _failed(path: Path) -> str:
    """Return a table of the prompts that were given up, with the reasons."""
    failed = [
        (record["step"], number, reason)
        for _, record in read_lines(path)
        if record is not None and isinstance(record.get("failed"), dict)
        for number, reason in record["failed"].items()
    ]
    if not failed:
        return ""
    note = f"{len(failed):,} prompts given up" + (f", the last {MAX_FAILED}" if len(failed) > MAX_FAILED else "")
    rows = [
        _cells("th", "step", "prompt", "", "reason"),
        *(_cells("td", s, n, "", r) for s, n, r in failed[-MAX_FAILED:]),
    ]
    return element("details", element("summary", note) + element("table", "".join(rows)))


def _cells(tag: str, *texts: object) -> str:
    return element("tr", "".join(element(tag, escaped(text)) for text in texts))


def _log(events: list[dict[str, Any]]) -> str:
    if not events:
        return element("p", "The run has no <code>events.jsonl</code>, so restarts are not known.", class_="note")
    shown = events
    if len(events) > MAX_EVENTS:
        important = [event for event in events if event.get("kind") in _KEPT_KINDS]
        shown = important[-MAX_EVENTS:]
    rows = "".join(map(_row, shown))
    head = "".join(element("th", word) for word in ("time (UTC)", "step", "kind", "event"))
    note = f"{len(shown):,} of {len(events):,} lines of the log" if len(shown) < len(events) else "The run's log"
    return element("details", element("summary", note) + element("table", element("tr", head) + rows), open="")


def _row(event: dict[str, Any]) -> str:
    kind = str(event.get("kind", ""))
    cells = [_time(event.get("time_unix_s")), escaped(event["step"]), escaped(kind), escaped(event["text"])]
    return element("tr", "".join(element("td", cell) for cell in cells), class_=f"kind-{kind}")


def _time(unix_s: object) -> str:
    try:
        return f"{datetime.fromtimestamp(float(unix_s), UTC):%Y-%m-%d %H:%M:%S}"  # type: ignore[arg-type] # checked by the except
    except (TypeError, ValueError, OverflowError, OSError):
        return "–"
