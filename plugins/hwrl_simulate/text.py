"""The results of simulations as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hwrl_simulate.calibration import averages, settled
from hwrl_simulate.simulation import SimulatedRun
from hwrl_simulate.workload import Workload

_COLUMNS = {
    "devices": "{:,}",
    "step_s": "{:.3g}",
    "tokens_per_s": "{:,.0f}",
    "per_device": "{:,.1f}",
    "trainer_idle": "{:.0%}",
    "rollout_idle": "{:.0%}",
    "staleness_mean": "{:.2f}",
    "staleness_max": "{:.0f}",
    "sync_s": "{:.3g}",
    "deaths": "{}",
    "lost_steps": "{}",
    "speedup": "{:.2f}x",
}
_TITLES = (
    "devices",
    "step s",
    "tokens/s",
    "per device",
    "trainer idle",
    "rollout idle",
    "staleness",
    "max",
    "sync s",
    "deaths",
    "lost steps",
    "speedup over synchronous",
)


def result_of(run: SimulatedRun, baseline: SimulatedRun | None = None) -> dict[str, float]:
    """Return the averages of a run in its steady state; with a ``baseline``, also the speedup in tokens per second."""
    means = averages(settled(run.lines))
    row = {
        "devices": run.size.devices,
        **means,
        "per_device": means["tokens_per_s"] / run.size.devices,
        "deaths": run.replica_deaths + run.trainer_deaths,
        "lost_steps": run.lost_steps,
    }
    if baseline is not None:
        row["speedup"] = means["tokens_per_s"] / averages(settled(baseline.lines))["tokens_per_s"]
    return row


def table_head(*, beside_sync: bool) -> str:
    """Return the two head lines of a table whose rows are made by :func:`table_row`."""
    titles = [title for name, title in zip(_COLUMNS, _TITLES, strict=True) if beside_sync or name != "speedup"]
    return "| " + " | ".join(titles) + " |\n|" + "---:|" * len(titles)


def table_row(row: Mapping[str, Any]) -> str:
    """Return the table row for a result of :func:`result_of`."""
    return "| " + " | ".join(shape.format(row[name]) for name, shape in _COLUMNS.items() if name in row) + " |"


def assumptions(workload: Workload, sources: Mapping[str, str]) -> str:
    """Return a table of all assumptions, each with its source."""
    lines = ["| assumption | value | source |", "|---|---:|---|"]
    lines += [
        f"| {field.name} | {getattr(workload, field.name):.5g} | {sources.get(field.name, 'default')} |"
        for field in dataclasses.fields(workload)
    ]
    return "\n".join(lines)


def limits_exceeded(run: SimulatedRun) -> str | None:
    """Return a sentence if the real run would have ended early, because its trainer died too often; None otherwise.

    Deaths of replicas have no such limit, as long as the replicas finish prompts in between.
    """
    limit = run.size.config.train.max_restarts
    if run.trainer_deaths <= limit:
        return None
    return (
        f"{run.size.devices:,} devices: train.max_restarts={limit} would have ended the run: "
        f"the trainer died {run.trainer_deaths} times in {run.seconds:,.0f} s"
    )


def as_json(rows: Sequence[Mapping[str, Any]], workload: Workload, sources: Mapping[str, str]) -> str:
    """Return the results and the assumptions as JSON."""
    return json.dumps({"sizes": rows, "assumptions": dataclasses.asdict(workload), "sources": dict(sources)}, indent=1)
