"""``hwrl new-transport NAME``: write a package with a new transport."""

from __future__ import annotations

import argparse

from hwrl.cli.packages import add_arguments, next_steps, write_package
from hwrl.testing.levels import Kind

HELP = "write a package with a new transport, ready to install and to change"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    add_arguments(parser, "acme")


def run(args: argparse.Namespace) -> int:
    """Write the package and print the next steps; return 0."""
    folder = write_package(Kind.TRANSPORT, args.name, args.into)
    print(next_steps(Kind.TRANSPORT, args.name, folder))
    return 0
