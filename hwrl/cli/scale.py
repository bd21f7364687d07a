"""``hwrl scale``: change the number of rollout replicas of a running run."""

from __future__ import annotations

import argparse

from hwrl.cli.arguments import count, local_path

HELP = "let rollout replicas join or leave a run while it goes on"


def configure(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("dir", type=local_path, metavar="RUN_DIR", help="the directory of a run that runs now")
    parser.add_argument("--replicas", type=_count, required=True, metavar="N", help="replicas that shall run")
    parser.add_argument("--timeout-s", type=_seconds, default=30.0, metavar="S", help="how long to wait for its answer")


def run(args: argparse.Namespace) -> int:
    """Ask the run, and print its answer; 0 if it agrees."""
    from hwrl.run.scaling import request_replicas

    print(request_replicas(args.dir, args.replicas, timeout_s=args.timeout_s))
    return 0


def _count(text: str) -> int:
    from hwrl.run.config import MOST_PROCESSES

    return count(text, most=MOST_PROCESSES)


def _seconds(text: str) -> float:
    if not 0 <= (seconds := float(text)) <= 1e7:
        raise ValueError
    return seconds
