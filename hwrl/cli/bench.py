"""``hwrl bench``: measure parts of hwrl beside what they are built on, in one run."""

from __future__ import annotations

import argparse
import importlib

HELP = "measure weight transfer, memory offload, checkpoints, asynchronous training, LoRA or the cost of a call"

BENCHMARKS = ("weights", "offload", "checkpoint", "async", "lora", "overhead")
"""Each is the module ``hwrl.cli.bench_<name>`` with HELP, configure(parser) and run(args), like a subcommand."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subparser for each benchmark."""
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(BENCHMARKS) + "}")
    for name in BENCHMARKS:
        module = importlib.import_module(f"hwrl.cli.bench_{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(subparser)
        subparser.set_defaults(benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    status: int = args.benchmark(args)
    return status
