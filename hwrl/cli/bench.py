"""``hwrl bench``: measure parts of hwrl beside what they are built on, in one run."""

from __future__ import annotations

import argparse
import importlib
import importlib.util

HELP = "measure weight transfer or asynchronous training"

BENCHMARKS = ("weights", "async")
"""Each is the module ``hwrl.cli.bench_<name>`` with HELP, configure(parser) and run(args), like a subcommand."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subparser for each benchmark that is installed."""
    subparsers = parser.add_subparsers(required=True, metavar="{" + ",".join(_installed()) + "}")
    for name in _installed():
        module = importlib.import_module(f"hwrl.cli.bench_{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.configure(subparser)
        subparser.set_defaults(benchmark=module.run)


def run(args: argparse.Namespace) -> int:
    """Run the chosen benchmark."""
    status: int = args.benchmark(args)
    return status


def _installed() -> list[str]:
    return [name for name in BENCHMARKS if importlib.util.find_spec(f"hwrl.cli.bench_{name}")]
