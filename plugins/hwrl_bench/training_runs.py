"""Training runs of the demo, for benchmarks of two configurations."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from hwrl_bench.ways import BenchPlan

History = list[dict[str, float]]
"""The metrics of one run, by step."""


def train_in_turns(
    plan: BenchPlan, config: Path, overrides: Mapping[str, Sequence[str]], *, scratch: Path
) -> dict[str, list[History]]:
    """Train with the overrides of each way in turns, in directories below ``scratch``; return the histories by way."""

    def train_way(way: str, number: int) -> History:
        print(f"round {number + 1} of {plan.rounds}: {way}", file=sys.stderr, flush=True)
        return _train(config, overrides[way], directory=scratch / f"{way}-{number}")

    return plan.take_turns(train_way)


def _train(config_path: Path, overrides: Sequence[str], *, directory: Path) -> History:
    """Train in ``directory`` without checkpoints and evaluation; raise KeyboardInterrupt if Ctrl-C ended the run."""
    from hwrl.run import PlainView, load_config, read_metrics, run_training

    only_training = ["checkpoint.save_every_steps=0", "eval.every_steps=0", "goals={}"]
    config = load_config(config_path, [*overrides, *only_training, f"dir={directory}"])
    summary = run_training(config, PlainView(config.train.steps, stream=sys.stderr, interval_s=10.0))
    if not summary.finished:
        raise KeyboardInterrupt
    return read_metrics(directory)
