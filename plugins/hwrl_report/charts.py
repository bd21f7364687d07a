"""Define the charts of the page: which metrics are drawn together, and a hint for the reader."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hwrl_report.columns import BINS, MetricColumns, Reals, bin_means

LEFT_OUT = ("step", "time_s", "eval/version", "perf/bottleneck")
"""Metrics without a curve, because they are axes or codes."""


@dataclass(frozen=True)
class Chart:
    """One plot of all metrics whose names match ``pattern``."""

    title: str
    pattern: str
    hint: str = ""


SECTIONS: dict[str, list[Chart]] = {
    "Learning": [
        Chart("Reward", r"reward/mean|eval/reward|eval/[^/]+/reward", "of the batch; evaluations on held-out prompts"),
        Chart("Further rewards", r"reward/(?!mean$|std$).*", "the reward function's other metrics, means of the batch"),
        Chart("Spread of rewards", r"reward/std|groups/.*", "nothing is learned from a prompt with equal rewards"),
        Chart("Evaluation", r"eval/(?!version$|reward$).*"),
        Chart("Loss", r"(actor|critic)/(.*_)?loss"),
        Chart("Entropy", r"actor/.*entropy.*", "a fall to 0 means that the policy no longer explores"),
        Chart("KL", r"(actor/)?.*(^|[/_])kl($|_).*", "divergence of two policies; it rises when they drift apart"),
        Chart("Gradient norm", r"(actor|critic)/grad_norm"),
        Chart("Clipping and importance weights", r"actor/(clip.*|is_.*|.*ratio.*)"),
        Chart("Length of responses", r"response/length_.*", "tokens"),
        Chart("Truncated responses", r"response/truncated_ratio", "share of responses that were cut off"),
        Chart("Learning rate", r"(actor|critic)/learning_rate"),
        Chart("Critic", r"critic/.*"),
    ],
    "Throughput": [
        Chart("Tokens per second", r"(trainer|rollout)/tokens_per_s", "of both sides, over the wall time"),
        Chart(
            "Tokens per second and device", r"perf/.*tokens_per_s_per_device", "train, rollout: over their busy time"
        ),
        Chart("Model FLOPs utilisation", r"perf/mfu", "of the device's peak, while the trainer trains"),
        Chart("Seconds of a step", r"perf/step_s", "waits and saves included"),
        Chart("Balance of the ranks", r"perf/(imbalance|padding_share|recompilations)"),
        Chart("Weight transfer", r"sync/.*_s|weights/(load|offload)_s", "seconds of each stage"),
        Chart("Checkpoints", r"checkpoint/.*", "seconds for which the trainer waits for a save"),
    ],
    "Staleness": [
        Chart("Age of trained tokens", r"staleness/.*", "weight versions between generation and training"),
        Chart("Partial rollout", r"partial/.*", "groups with tokens of several versions"),
        Chart("Idle shares", r"(trainer|rollout)/idle_ratio", "share of each side's time"),
        Chart("Prompts between the sides", r"ledger/(accepted|running|returned|owed)", "finished, running, given back"),
    ],
}
FAULT_CHARTS = [
    Chart("Prompts that failed or were not used", r"ledger/(failures|expired|rejected|filtered.*|failed.*|skipped.*)"),
    Chart("Replicas", r"rollout/replicas|sync/(receivers|excluded)", "running; in a transfer; excluded from it"),
    Chart("Errors of the reward function", r"rollout/reward_errors"),
]

TRAINER_PARTS = ("wait", "train", "sync", "save")
REPLICA_PARTS = ("idle", "generate", "update", "sleep")
"""The parts of a bar in the order of drawing: waiting first, then the work."""


def assign(charts: Iterable[Chart], names: list[str]) -> dict[str, tuple[Chart, list[str]]]:
    """Return the charts that have metrics, by id, each with these metrics. Removes the metrics from ``names``."""
    found = {}
    for chart in charts:
        own: list[str] = []
        rest: list[str] = []
        for name in names:
            (own if re.fullmatch(chart.pattern, name) else rest).append(name)
        if own:
            found[re.sub(r"\W+", "-", chart.title.lower())] = chart, own
            names[:] = rest
    return found


def timeline(columns: MetricColumns) -> dict[str, object] | None:
    """Return how the trainer and an average replica spent each step, as bars in seconds; None without such metrics.

    With more than ``BINS`` steps, a bar is the mean of neighbouring steps.
    """
    steps = columns.steps.get("timing_s/wait")
    if steps is None:
        return None
    starts = np.linspace(0, len(steps), min(BINS, len(steps)), endpoint=False).astype(np.int64)
    replicas = np.maximum(1.0, _at(columns, "rollout/replicas", steps))
    extra = [name[9:] for name in columns.values if name.startswith("timing_s/") and name[9:] not in TRAINER_PARTS]
    trainer = {part: _at(columns, f"timing_s/{part}", steps) for part in (*TRAINER_PARTS, *extra)}
    replica = {part: _at(columns, f"rollout/{part}_s", steps) / replicas for part in REPLICA_PARTS}
    return {
        "steps": steps[starts].tolist(),
        "end": int(steps[-1]) + 1,
        "trainer": {part: bin_means(values, starts) for part, values in trainer.items() if values.any()},
        "replica": {part: bin_means(values, starts) for part, values in replica.items() if values.any()},
    }


def _at(columns: MetricColumns, name: str, steps: npt.NDArray[np.int64]) -> Reals:
    """Return the values of a metric at ``steps``; 0.0 where it is missing."""
    values = np.zeros(len(steps))
    if name in columns.values:
        places = np.searchsorted(steps, columns.steps[name]).clip(max=len(steps) - 1)
        known = steps[places] == columns.steps[name]
        values[places[known]] = columns.values[name][known]
    return values
