"""``hwrl new-engine NAME``: write a package with a new rollout or train engine."""

from __future__ import annotations

import argparse

from hwrl.cli.packages import add_arguments, next_steps, write_package
from hwrl.testing.levels import Kind

HELP = "write a package with a new rollout or train engine, ready to install and to change"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_arguments(parser, "acme")
    parser.add_argument("--kind", choices=("rollout", "train"), default="rollout", help="what it does (rollout)")


def run(args: argparse.Namespace) -> int:
    """Write the package and print the next steps; return 0."""
    kind = Kind.TRAIN_ENGINE if args.kind == "train" else Kind.ROLLOUT_ENGINE
    folder = write_package(kind, args.name, args.into)
    print(next_steps(kind, args.name, folder))
    return 0
