"""``hwrl conformance NAME``: run the conformance kit on a backend."""

from __future__ import annotations

import argparse

HELP = "check that a backend keeps every promise that hwrl builds on"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("backend", help="the backend's name")
    parser.add_argument("-k", dest="keyword", default="", help="run only the checks that match this pytest expression")


def run(args: argparse.Namespace) -> int:
    """Run the kit on the named backend and print each result; return 0 if every check passed."""
    from hwrl.discovery import get_backend, set_backend
    from hwrl.testing.conformance import run_kit

    set_backend(args.backend)
    status, _ = run_kit(get_backend(), keyword=args.keyword)
    return status
