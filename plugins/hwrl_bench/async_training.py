"""``hwrl bench async``: asynchronous training against the synchronous baseline of the same code."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hwrl.errors import ConfigError
from hwrl_bench.arguments import add_json, positive_int, whole_number
from hwrl_bench.result import provenance, report
from hwrl_bench.training_runs import History, train_in_turns
from hwrl_bench.ways import BenchPlan

HELP = "asynchronous training against staleness_threshold=0, the same work on the same cores"

LENGTHS = [4] * 14 + [6] * 3 + [12] * 2
"""Digits to sort, each entry equally often; a last one, ``--longest``, makes one answer in twenty much longer."""
COMMON = [
    "rollout.max_running=512",
    "optimizer.learning_rate=1e-3",  # behind the numbers in docs/benchmarks.md; the demo itself learns more slowly
    "train.micro_batch_tokens=2048",  # their activations fit a CPU core's caches
    "weights.bypass_cpu=false",  # the trainer does not wait for the replica to take weights
]
"""Settings of both kinds of runs."""
_OPTIONS = ("async_training.staleness_threshold=", "async_training.lead_versions=")
TARGET_SHARE = 0.9
"""The target reward is this share of the lower of the two final rewards."""
SMOOTHED_STEPS = 10
"""A reward is the mean of this many steps, at the end and on the way."""

RunMetrics = dict[str, float | None]
"""One run's metrics; None if the run did not reach or measure one."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--steps", type=positive_int, default=300, help="training steps of each run (default 300)")
    parser.add_argument(
        "--staleness", type=whole_number, default=8, help="staleness_threshold of the asynchronous run (default 8)"
    )
    parser.add_argument(
        "--lead",
        type=float,
        help="lead_versions of the asynchronous run (default: half of the staleness)",
    )
    parser.add_argument(
        "--longest",
        type=positive_int,
        default=64,
        help="digits to sort in the longest prompts, one in twenty; 70 %% have 4 (default 64)",
    )
    parser.add_argument("--rounds", type=positive_int, default=1, help="runs of each kind, alternating (default 1)")
    parser.add_argument("--seed", type=whole_number, default=1)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration to add, to both kinds of runs")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train both ways in turns, print a table, write the JSON. Ctrl-C leaves no result."""
    from hwrl.run import write_demo

    overrides = overrides_of(args)
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        config = write_demo(scratch, seed=args.seed, digits=[*LENGTHS, args.longest], prompts=4096)
        histories = train_in_turns(BenchPlan(tuple(overrides), args.rounds), config, overrides, scratch=scratch)
    result = compare(histories) | {"overrides": overrides, "longest": args.longest, "seed": args.seed}
    report(result, table(result), json_path=args.json)
    return 0


def overrides_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the configuration of each kind of runs. Settings of the user win over :data:`COMMON`."""
    given = [word for word in args.overrides if word.startswith(_OPTIONS)]
    if given:
        raise ConfigError(
            f"{given[0]!r} is not for both kinds of runs",
            why="the synchronous run has a staleness_threshold of 0",
            fix="give the asynchronous run's with --staleness and --lead",
        )
    lead = args.staleness / 2 if args.lead is None else args.lead
    limits = {
        "async": [f"async_training.staleness_threshold={args.staleness}", f"async_training.lead_versions={lead:g}"],
        "sync": ["async_training.staleness_threshold=0"],
    }
    return {way: [f"train.steps={args.steps}", *COMMON, *args.overrides, *own] for way, own in limits.items()}


def compare(histories: dict[str, list[History]]) -> dict[str, Any]:
    """Return medians over the rounds for each way, and the ratios of async to sync; above 1, async is better.

    A metric that one round did not reach, like the target reward, is None; so are its median and the ratio.
    """
    final = {way: statistics.median(map(_final_reward, runs)) for way, runs in histories.items()}
    target = TARGET_SHARE * min(final.values())
    rounds = {way: [_row(history, target=target) for history in runs] for way, runs in histories.items()}
    kinds = {way: {name: _median([row[name] for row in rows]) for name in rows[0]} for way, rows in rounds.items()}
    fast, slow = kinds["async"], kinds["sync"]
    return {
        "benchmark": "async",
        "target_reward": target,
        "kinds": kinds,
        "ratios": {
            "tokens_per_s": _ratio(fast["tokens_per_s"], slow["tokens_per_s"]),
            "time_to_reward": _ratio(slow["time_to_reward_s"], fast["time_to_reward_s"]),
            "total_time": _ratio(slow["total_s"], fast["total_s"]),
            "final_reward": _ratio(fast["final_reward"], slow["final_reward"]),
        },
        "rounds": rounds,
        **provenance("torch", "ray", "transformers"),
    }


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if len(known) == len(values) else None


def _ratio(over: float | None, under: float | None) -> float | None:
    return None if over is None or not under else over / under


def _row(history: History, *, target: float) -> RunMetrics:
    """Return one run's metrics. Seconds count from the moment when all processes are up."""
    total_s = history[-1]["time_s"]
    after_first = history[1:] or history
    return {
        "total_s": total_s,
        "tokens_per_s": history[-1]["response/tokens_total"] / total_s,
        "time_to_reward_s": _time_to(history, target),
        "final_reward": _final_reward(history),
        "eval_reward": history[-1].get("eval/reward"),
        "staleness_mean": statistics.mean(line["staleness/mean"] for line in history),
        "trainer_idle": statistics.mean(line["trainer/idle_ratio"] for line in after_first),
        "rollout_idle": statistics.mean(line["rollout/idle_ratio"] for line in after_first),
        "mean_length": statistics.mean(line["response/length_mean"] for line in history),
        "longest_length_median": statistics.median(line["response/length_max"] for line in history),
    }


def _final_reward(history: History) -> float:
    return _smoothed(history, end=len(history))


def _smoothed(history: History, *, end: int) -> float:
    """Return the mean training reward of the last steps before index ``end``."""
    return statistics.mean(line["reward/mean"] for line in history[max(0, end - SMOOTHED_STEPS) : end])


def _time_to(history: History, target: float) -> float | None:
    """Return the seconds until the smoothed training reward first reached ``target``, None if it never did."""
    for end in range(min(SMOOTHED_STEPS, len(history)), len(history) + 1):
        if _smoothed(history, end=end) >= target:
            return history[end - 1]["time_s"]
    return None


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    fast, slow = result["kinds"]["async"], result["kinds"]["sync"]
    lines = [f"{'':<24}{'async':>14}{'sync':>14}"]
    lines += [f"{name:<24}{_shown(fast[name], name):>14}{_shown(slow[name], name):>14}" for name in fast]
    lines += [f"async / sync, {name}: {_shown(value, name)}" for name, value in result["ratios"].items()]
    lines.append(
        f"rewards are of training, means of {SMOOTHED_STEPS} steps (eval_reward: held out, greedy); "
        f"time to reward is to {result['target_reward']:.3f}, {TARGET_SHARE:.0%} of the lower final reward"
    )
    return "\n".join(lines)


def _shown(value: float | None, name: str) -> str:
    if value is None:
        return "not reached" if name.startswith("time_to_reward") else "not measured"
    return f"{value:.4g}"
