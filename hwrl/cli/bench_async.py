"""``hwrl bench async``: asynchronous training against the synchronous baseline of the same code."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HELP = "asynchronous training against staleness_threshold=0, the same work on the same cores"

LENGTHS = [4] * 14 + [6] * 3 + [12] * 2 + [24]
"""Digits to sort, each entry equally often: most answers are short, one in twenty is six times as long."""
TARGET_SHARE = 0.9
"""Time-to-reward is taken at this share of the lower of the two final rewards."""
SMOOTHED_STEPS = 10


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--steps", type=int, default=300, help="training steps of each run (default 300)")
    parser.add_argument(
        "--staleness", type=int, default=2, help="staleness_threshold of the asynchronous run (default 2)"
    )
    parser.add_argument("--rounds", type=int, default=1, help="runs of each kind, alternating (default 1)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there too")


def run(args: argparse.Namespace) -> int:
    """Train both ways, print a table, write the JSON."""
    from hwrl.run.demo import write_demo

    kinds = {"async": args.staleness, "sync": 0}
    with tempfile.TemporaryDirectory() as scratch:
        config = write_demo(Path(scratch), seed=args.seed, digits=LENGTHS, prompts=4096)
        histories: dict[str, list[list[dict[str, float]]]] = {kind: [] for kind in kinds}
        for number in range(args.rounds):
            for kind, staleness in kinds.items():
                print(f"round {number + 1} of {args.rounds}: {kind}", file=sys.stderr, flush=True)
                histories[kind].append(_train(config, steps=args.steps, staleness=staleness, name=f"{kind}-{number}"))
    result = compare(histories)
    print(_table(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _train(config_path: Path, *, steps: int, staleness: int, name: str) -> list[dict[str, float]]:
    from hwrl.run.config import load_config
    from hwrl.run.pipeline import run_training
    from hwrl.run.report import PlainView, read_metrics

    directory = config_path.parent / name
    words = [
        f"train.steps={steps}",
        f"async_training.staleness_threshold={staleness}",
        f"dir={directory}",
        "rollout.max_running=512",
        "checkpoint.save_every_steps=0",
        "eval.every_steps=0",
        "goals={}",
    ]
    run_training(load_config(config_path, words), PlainView(steps, stream=sys.stderr, interval_s=10.0))
    return read_metrics(directory)


def compare(histories: dict[str, list[list[dict[str, float]]]]) -> dict[str, Any]:
    """Return medians over the rounds for each kind, and the ratios of async to sync (above 1: async is better)."""
    from hwrl.cli.provenance import provenance

    final = {kind: statistics.median(_final_reward(one) for one in runs) for kind, runs in histories.items()}
    target = TARGET_SHARE * min(final.values())
    kinds = {kind: _medians(runs, target=target) for kind, runs in histories.items()}
    fast, slow = kinds["async"], kinds["sync"]
    return {
        "benchmark": "async",
        "target_reward": target,
        "kinds": kinds,
        "ratios": {
            "tokens_per_s": fast["tokens_per_s"] / slow["tokens_per_s"],
            "time_to_reward": slow["time_to_reward_s"] / fast["time_to_reward_s"],
            "total_time": slow["total_s"] / fast["total_s"],
            "final_reward": fast["final_reward"] / slow["final_reward"],
        },
        "rounds": {kind: [_row(one, target=target) for one in runs] for kind, runs in histories.items()},
        **provenance("torch", "ray", "transformers"),
    }


def _medians(runs: Sequence[list[dict[str, float]]], *, target: float) -> dict[str, float]:
    rows = [_row(one, target=target) for one in runs]
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _row(history: list[dict[str, float]], *, target: float) -> dict[str, float]:
    """Return one run's figures; seconds count from when everything was up."""
    total_s = history[-1]["time_s"]
    tokens = history[-1]["response/tokens_total"]
    lengths = sorted(line["response/length_max"] for line in history)
    return {
        "total_s": total_s,
        "tokens_per_s": tokens / total_s,
        "time_to_reward_s": _time_to(history, target),
        "final_reward": _final_reward(history),
        "staleness_mean": statistics.mean(line["staleness/mean"] for line in history),
        "trainer_idle": statistics.mean(line["trainer/idle_ratio"] for line in history[1:]),
        "rollout_idle": statistics.mean(line["rollout/idle_ratio"] for line in history[1:]),
        "mean_length": statistics.mean(line["response/length_mean"] for line in history),
        "longest_length_median": lengths[len(lengths) // 2],
    }


def _final_reward(history: list[dict[str, float]]) -> float:
    return history[-1]["eval/reward"]


def _time_to(history: list[dict[str, float]], target: float) -> float:
    """Return the seconds until the mean reward of the last steps first reached ``target``; all of them if never."""
    for end in range(SMOOTHED_STEPS, len(history) + 1):
        if statistics.mean(line["reward/mean"] for line in history[end - SMOOTHED_STEPS : end]) >= target:
            return history[end - 1]["time_s"]
    return history[-1]["time_s"]


def _table(result: dict[str, Any]) -> str:
    names = list(result["kinds"]["async"])
    lines = [f"{'':<24}{'async':>12}{'sync':>12}"]
    lines += [
        f"{name:<24}{result['kinds']['async'][name]:>12.4g}{result['kinds']['sync'][name]:>12.4g}" for name in names
    ]
    lines += [f"async / sync, {name}: {value:.2f}" for name, value in result["ratios"].items()]
    lines.append(f"time to reward is to {result['target_reward']:.3f}, {TARGET_SHARE:.0%} of the lower final reward")
    return "\n".join(lines)
