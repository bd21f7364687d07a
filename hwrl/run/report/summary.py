"""Summarise a run in a few lines at its end, and check its goals."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hwrl.errors import did_you_mean
from hwrl.run.config import RUN_CONFIG, Config
from hwrl.run.invocation import invoked
from hwrl.run.report.bottleneck import busy_shares, describe_waits
from hwrl.run.report.records import Metrics
from hwrl.run.report.run_report import METRICS, MODEL_DIRECTORY

SENT = ("sync/base_sent", "sync/base_nbytes", "sync/adapter_nbytes")
"""Metrics of a LoRA run: the weights that were sent since the previous line."""


@dataclass(frozen=True)
class Summary:
    """The outcome of a run. ``missed_goals`` has a sentence for each goal that was not reached."""

    finished: bool
    missed_goals: list[str]
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether the run finished all steps and reached all goals."""
        return self.finished and not self.missed_goals


def missed_goals(goals: dict[str, float], metrics: Metrics) -> list[str]:
    """Return a sentence for each goal that ``metrics`` does not reach.

    >>> missed_goals({"reward/mean": 0.9}, {"reward/mean": 0.95})
    []
    >>> missed_goals({"eval/exact": 0.85}, {"eval/exact": 0.5})
    ['eval/exact is 0.5, the goal is 0.85']
    >>> missed_goals({"eval/exact": 0.85}, {"eval/exact": float("nan")})
    ['eval/exact is nan, the goal is 0.85']
    """
    missed = []
    for name, goal in goals.items():
        reached = metrics.get(name)
        if reached is None or not reached >= goal:  # NaN reaches no goal
            missed.append(f"{name} is {'missing' if reached is None else f'{reached:.4g}'}, the goal is {goal:.4g}")
    return missed


def unknown_goals(goals: dict[str, float], line: Metrics, *, eval_sets: Sequence[str]) -> list[str]:
    """Return a sentence for each goal whose metric does not exist.

    A metric exists if it is in ``line``, the line of the first step, or if an evaluation adds it later.
    ``eval_sets`` has the names of the evaluation data sets; a single set has an empty name.

    >>> unknown_goals({"eval/exat": 0.9}, {"reward/mean": 0.5, "reward/exact": 0.25}, eval_sets=[""])
    ["the goal 'eval/exat' is not the name of a metric so far; did you mean 'eval/exact'?"]
    """
    rewards = [name.partition("/")[2] for name in line if name.startswith("reward/")]
    own = {"reward", *rewards} - {"mean", "std"}
    prefixes = [f"eval/{name}/" if name else "eval/" for name in eval_sets]
    known = {*line, *(f"{prefix}{name}" for prefix in prefixes for name in own)} | (
        {"eval/version"} if prefixes else set()
    )
    passes = tuple(f"{prefix}pass@" for prefix in prefixes)
    sentences = []
    for name in goals:
        if name in known or name.startswith(passes):
            continue
        sentence = f"the goal {name!r} is not the name of a metric so far"
        sentences.append("; ".join(filter(None, [sentence, did_you_mean(name, known)])))
    return sentences


def summarise(config: Config, history: list[Metrics], *, interrupted: bool, faults: Sequence[str] = ()) -> Summary:
    """Return the summary of a run from its lines of metrics. ``faults`` has sentences about what was not healthy."""
    last = history[-1] if history else {}
    missed = [] if interrupted else missed_goals(config.goals, last)
    step = int(last.get("step", 0))
    how = "interrupted" if interrupted else "done"
    lines = [f"{how} after step {step} of {config.train.steps}, {last.get('time_s', 0.0):.0f} s of training"]
    lines += [f"warning: {sentence}" for sentence in faults]
    evals = [name for name in last if name.startswith("eval/") and name.endswith(("/reward", "/exact"))]
    names = ("reward/mean", *evals, "weights/version", "response/tokens_total")
    lines += [f"  {name:<22} {last[name]:.6g}" for name in names if name in last]
    for name in ("staleness/mean", "trainer/idle_ratio", "rollout/idle_ratio") if history else ():
        values = [line[name] for line in history if name in line]
        lines += [f"  {name:<22} {statistics.mean(values):.3g}, mean of all steps"] if values else []
    lines += _speed(history)
    if any("sync/base_sent" in line for line in history):
        sent, base, adapter = (sum(line.get(name, 0.0) for line in history) for name in SENT)
        lines.append(f"  published: the base {sent:.0f} times, {base:,.0f} B; adapters, {adapter:,.0f} B")
    if history:
        lines.append(f"  metrics {config.dir / METRICS}")
        lines.append(f"  to make a page about the run: {invoked()} report {shlex.quote(str(config.dir))}")
    if (config.dir / MODEL_DIRECTORY).is_dir() and not interrupted:
        lines.append(f"  model {config.dir / MODEL_DIRECTORY}")
    if config.goals and not interrupted and not missed:
        reached = (f"{name} is {last[name]:.4g}, the goal was {goal:.4g}" for name, goal in config.goals.items())
        lines.append(f"goals reached: {'; '.join(reached)}")
    lines += [f"goal missed: {sentence}" for sentence in missed]
    again = f"{invoked()} train {shlex.quote(str(config.dir / RUN_CONFIG))} resume=true"
    if missed:
        lines.append(f"train longer with: {again} train.steps={2 * config.train.steps}")
    if interrupted:
        advice = "continue" if history else "no step was trained; start again"
        lines.append(f"{advice} with: {again}")
    return Summary(not interrupted, missed, "\n".join(lines))


def _speed(history: list[Metrics]) -> list[str]:
    """Return lines about the speed of the trainer and the rollout, and about the bottleneck."""
    lines = []
    for name in (
        "perf/train_tokens_per_s_per_device",
        "perf/rollout_tokens_per_s_per_device",
        "perf/tokens_per_s_per_device",
        "perf/mfu",
    ):
        values = [line[name] for line in history if name in line]
        if values:
            value = statistics.median(values)
            lines.append(f"  {name} {f'{value:,.0f}' if value >= 100 else f'{value:.3g}'}, median of all steps")
    shares = busy_shares(history)
    if shares is not None:
        lines.append(f"  bottleneck: {shares}; wall time is {shares.wall_ratio:.2f} × the busy time of the busier side")
    waits = describe_waits(history)
    if waits is not None:
        lines.append(f"  balance: {waits}")
    return lines
