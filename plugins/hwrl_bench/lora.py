"""``hwrl bench lora``: send an adapter's base when a replica needs it, or with every version."""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from hwrl.errors import ConfigError
from hwrl_bench.arguments import add_json, positive_int
from hwrl_bench.result import provenance, report
from hwrl_bench.training_runs import History, train_in_turns
from hwrl_bench.ways import BenchPlan

HELP = "LoRA: the base sent where it is needed, against the base sent with every version"

WARM_UP_STEPS = 3
"""The first steps do not count: they wait for the first prompts, and send the base in any case."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="configuration to add, to both kinds of runs")
    parser.add_argument(
        "--config", type=Path, help="configuration of the runs (default: the demo, with a larger model)"
    )
    parser.add_argument("--hidden", type=_width, default=512, help="width of the demo's model (default 512)")
    parser.add_argument("--layers", type=positive_int, default=8, help="layers of the demo's model (default 8)")
    parser.add_argument("--rank", type=positive_int, default=16, help="of the adapter (default 16)")
    parser.add_argument("--steps", type=positive_int, default=20, help="training steps of each run (default 20)")
    parser.add_argument("--rounds", type=positive_int, default=1, help="runs of each kind, alternating (default 1)")
    add_json(parser)


def _width(text: str) -> int:
    if positive_int(text) % 32:
        raise argparse.ArgumentTypeError(f"it must be a multiple of 32, and is {text}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Train both ways in turns, print a table, write the JSON. Ctrl-C leaves no result."""
    from hwrl.run import write_demo

    if args.steps <= WARM_UP_STEPS:
        raise ConfigError(
            f"--steps {args.steps} measures nothing",
            why=f"the first {WARM_UP_STEPS} steps do not count",
            fix="train more steps",
        )
    common = [*args.overrides, f"model.lora_rank={args.rank}", f"train.steps={args.steps}"]
    overrides = {way: [*common, f"weights.send_base={way}"] for way in ("needed", "always")}
    with tempfile.TemporaryDirectory() as directory:
        scratch = Path(directory)
        config = args.config or write_demo(scratch, seed=1, hidden=args.hidden, layers=args.layers)
        histories = train_in_turns(BenchPlan(tuple(overrides), args.rounds), config, overrides, scratch=scratch)
    result = compare(histories)
    report(result, table(result), json_path=args.json)
    return 0


def compare(histories: dict[str, list[History]]) -> dict[str, Any]:
    """Return medians over the rounds for each way, and the saved share of a step's time."""
    rounds = {way: [_row(history) for history in runs] for way, runs in histories.items()}
    kinds = {
        way: {name: statistics.median(row[name] for row in rows) for name in rows[0]} for way, rows in rounds.items()
    }
    return {
        "benchmark": "lora",
        "kinds": kinds,
        "saved_share_of_step": 1 - kinds["needed"]["step_s"] / kinds["always"]["step_s"],
        "rounds": rounds,
        **provenance("torch", "ray", "transformers", "peft"),
    }


def _row(history: History) -> dict[str, float]:
    """Return the means of one run over the steps after the warm-up."""
    steps = history[WARM_UP_STEPS:]
    return {
        "step_s": (steps[-1]["time_s"] - history[WARM_UP_STEPS - 1]["time_s"]) / len(steps),
        "sync_s": statistics.mean(line["timing_s/sync"] for line in steps),
        "update_s": statistics.mean(line["rollout/update_s"] for line in steps),
        "base_nbytes": statistics.mean(line.get("sync/base_nbytes", 0.0) for line in steps),
        "adapter_nbytes": statistics.mean(line.get("sync/adapter_nbytes", 0.0) for line in steps),
    }


def table(result: dict[str, Any]) -> str:
    """Return the result as text."""
    needed, always = result["kinds"]["needed"], result["kinds"]["always"]
    lines = [f"{'of a step':<20}{'base as needed':>18}{'base always':>18}"]
    lines += [f"{name:<20}{needed[name]:>18,.6g}{always[name]:>18,.6g}" for name in needed]
    lines.append(f"a step takes {result['saved_share_of_step']:.1%} less when the base is sent as needed")
    return "\n".join(lines)
