"""Which metrics are drawn together, and what a reader should know about them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hwrl.run.report.page.columns import BUCKETS, MetricColumns, Reals, bucket_means

LEFT_OUT = ("step", "time_s", "eval/version", "perf/bottleneck")
"""No curves: they are axes, or codes."""


@dataclass(frozen=True)
class Chart:
    """One chart: the metrics with names that match ``pattern``, in one plot."""

    title: str
    pattern: str
    hint: str = ""


SECTIONS: dict[str, list[Chart]] = {
    "Learning": [
        Chart("Reward", r"reward/mean|eval/reward|eval/[^/]+/reward", "of the batch; evaluations on held-out prompts"),
        Chart("Further rewards", r"reward/(?!mean$|std$).*", "the reward function's other metrics, means of the batch"),
        Chart(
            "Spread of rewards", r"reward/std|groups/.*", "a prompt with equal rewards of all responses teaches nothing"
        ),
        Chart("Evaluation", r"eval/(?!version$|reward$).*"),
        Chart("Loss", r"(actor|critic)/(.*_)?loss"),
        Chart("Entropy", r"actor/.*entropy.*", "a fall to 0 means that the policy no longer explores"),
        Chart("KL", r"(actor/)?.*(^|[/_])kl($|_).*", "distance of distributions; a rise means that they come apart"),
        Chart("Gradient norm", r"(actor|critic)/grad_norm"),
        Chart("Clipping and importance weights", r"actor/(clip.*|is_.*|.*ratio.*)"),
        Chart("Length of responses", r"response/length_.*", "tokens"),
        Chart("Truncated responses", r"response/truncated_ratio", "share that the length limit cut off"),
        Chart("Learning rate", r"(actor|critic)/learning_rate"),
        Chart("Critic", r"critic/.*"),
    ],
    "Throughput": [
        Chart("Tokens per second", r"(trainer|rollout)/tokens_per_s", "both sides, over all the time"),
        Chart("Tokens per second and device", r"perf/.*tokens_per_s_per_device", "train and rollout: while they work"),
        Chart("Model FLOPs utilisation", r"perf/mfu", "of the device's peak, while the trainer trains"),
        Chart("Seconds of a step", r"perf/step_s", "waits and saves included"),
        Chart("Work between the ranks", r"perf/(imbalance|padding_share|recompilations)"),
        Chart("Weight transfer", r"sync/.*_s|weights/(load|offload)_s", "seconds of its stages"),
        Chart("Checkpoints", r"checkpoint/.*", "seconds in which the trainer waits for a save"),
    ],
    "Staleness": [
        Chart("Age of trained tokens", r"staleness/.*", "weight versions between generation and training"),
        Chart("Partial rollout", r"partial/.*", "groups with tokens of several versions"),
        Chart("Idle shares", r"(trainer|rollout)/idle_ratio", "of the time of each side"),
        Chart("Prompts between the sides", r"ledger/(accepted|running|returned|owed)", "finished, running, given back"),
    ],
}
FAULT_CHARTS = [
    Chart("Prompts that failed or do not count", r"ledger/(failures|expired|rejected|filtered.*|failed.*|skipped.*)"),
    Chart("Replicas", r"rollout/replicas|sync/(receivers|excluded)", "live; in the transfer; excluded from it"),
    Chart("Errors of the reward function", r"rollout/reward_errors"),
]

TRAINER_PARTS = ("wait", "train", "sync", "save")
REPLICA_PARTS = ("idle", "generate", "update", "sleep")
"""The waiting first, then the work, in the order of drawing."""


def assign(charts: Iterable[Chart], names: list[str]) -> dict[str, tuple[Chart, list[str]]]:
    """Return the charts with a metric, by id, each with its metrics. Removes these from ``names``."""
    found = {}
    for chart in charts:
        own = [name for name in names if re.fullmatch(chart.pattern, name)]
        if own:
            found[re.sub(r"\W+", "-", chart.title.lower())] = chart, own
            names[:] = [name for name in names if name not in own]
    return found


def timeline(columns: MetricColumns) -> dict[str, object] | None:
    """Return the seconds of trainer and average replica per step, as bars; None without them.

    With more than ``BUCKETS`` steps, a bar is the mean of neighbouring steps.
    """
    steps = columns.steps.get("timing_s/wait")
    if steps is None:
        return None
    starts = np.linspace(0, len(steps), min(BUCKETS, len(steps)), endpoint=False).astype(np.int64)
    replicas = np.maximum(1.0, _at(columns, "rollout/replicas", steps))
    extra = [name[9:] for name in columns.values if name.startswith("timing_s/") and name[9:] not in TRAINER_PARTS]
    trainer = {part: _at(columns, f"timing_s/{part}", steps) for part in (*TRAINER_PARTS, *extra)}
    replica = {part: _at(columns, f"rollout/{part}_s", steps) / replicas for part in REPLICA_PARTS}
    return {
        "steps": steps[starts].tolist(),
        "end": int(steps[-1]) + 1,
        "trainer": {part: bucket_means(values, starts) for part, values in trainer.items() if values.any()},
        "replica": {part: bucket_means(values, starts) for part, values in replica.items() if values.any()},
    }


def _at(columns: MetricColumns, name: str, steps: npt.NDArray[np.int64]) -> Reals:
    """Return the metric at each of ``steps``, 0.0 where it is missing."""
    values = np.zeros(len(steps))
    if name in columns.values:
        places = np.searchsorted(steps, columns.steps[name]).clip(max=len(steps) - 1)
        known = steps[places] == columns.steps[name]
        values[places[known]] = columns.values[name][known]
    return values
