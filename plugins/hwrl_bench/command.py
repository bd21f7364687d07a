"""``hwrl bench NAME``: one subcommand for each benchmark."""

from __future__ import annotations

import argparse
import importlib

HELP = "measure training, generation, weights, loads, offload, checkpoints, async runs, the ledger, calls, plans"

BENCHMARKS = {
    "weights": "hwrl_bench.weights",
    "offload": "hwrl_bench.offload",
    "checkpoint": "hwrl_bench.checkpoint",
    "async": "hwrl_bench.async_training",
    "ledger": "hwrl_bench.ledger",
    "path": "hwrl_bench.whole_path",
    "overhead": "hwrl_bench.overhead",
    "train": "hwrl_bench.train",
    "load": "hwrl_bench.load",
    "rollout": "hwrl_bench.rollout",
    "plan": "hwrl_bench.plan",
}
"""The modules of the benchmarks. Each has HELP, configure(parser) and run(args), and imports torch in ``run`` only."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subparser for each benchmark."""
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(BENCHMARKS) + "}")
    for name, path in BENCHMARKS.items():
        module = importlib.import_module(path)
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(subparser)
        subparser.set_defaults(benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    status: int = args.benchmark(args)
    return status
