"""The result of simulations as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from hwrl.run.simulate.calibration import averages, settled
from hwrl.run.simulate.simulation import SimulatedRun
from hwrl.run.simulate.workload import Workload

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
    "beside synchronous",
)


def result_of(run: SimulatedRun, baseline: SimulatedRun | None = None) -> dict[str, float]:
    """Return the averages of a run after its start; with a ``baseline``, also the speed-up in tokens per second."""
    found = averages(settled(run.lines))
    row = {
        "devices": run.size.devices,
        **found,
        "per_device": found["tokens_per_s"] / run.size.devices,
        "deaths": run.replica_deaths + run.trainer_deaths,
        "lost_steps": run.lost_steps,
    }
    if baseline is not None:
        row["speedup"] = found["tokens_per_s"] / averages(settled(baseline.lines))["tokens_per_s"]
    return row


def table_head(*, beside_sync: bool) -> str:
    """Return the first two lines of a table with a :func:`table_row` for each size."""
    titles = [title for name, title in zip(_COLUMNS, _TITLES, strict=True) if beside_sync or name != "speedup"]
    return "| " + " | ".join(titles) + " |\n|" + "---:|" * len(titles)


def table_row(row: Mapping[str, Any]) -> str:
    """Return the line of a table for one result of :func:`result_of`."""
    return "| " + " | ".join(shape.format(row[name]) for name, shape in _COLUMNS.items() if name in row) + " |"


def assumptions(workload: Workload, sources: Mapping[str, str]) -> str:
    """Return a table of all assumptions with their ``sources``."""
    lines = ["| assumption | value | source |", "|---|---:|---|"]
    lines += [
        f"| {field.name} | {getattr(workload, field.name):.5g} | {sources.get(field.name, 'default')} |"
        for field in dataclasses.fields(workload)
    ]
    return "\n".join(lines)


def limits_exceeded(run: SimulatedRun) -> str | None:
    """Return a sentence if the real run would have ended with an error, after too many deaths of the trainer.

    Replicas die without a limit as long as they finish prompts between their deaths.
    """
    limit = run.size.config.train.max_restarts
    if run.trainer_deaths <= limit:
        return None
    return (
        f"{run.size.devices:,} devices: train.max_restarts={limit} would have ended the run, with "
        f"{run.trainer_deaths} deaths of the trainer in {run.seconds:,.0f} s"
    )


def as_json(rows: Sequence[Mapping[str, Any]], workload: Workload, sources: Mapping[str, str]) -> str:
    """Return the same as JSON."""
    return json.dumps({"sizes": rows, "assumptions": dataclasses.asdict(workload), "sources": dict(sources)}, indent=1)
