"""Runs points of the sweep: ``make fault-test POINTS=20 FAULT_SEED=1``; ``POINT=name`` repeats one."""

from __future__ import annotations

import argparse
import sys

from tests.faults.points import POINTS, Point, choose
from tests.faults.trial import Verdict, run_point

LAST_LINES = 15


def describe(point: Point, verdict: Verdict) -> str:
    """Return the result of a point as text; if it fell, with the last lines of the run's output."""
    word = "held" if verdict.held else "fell"
    number = POINTS.index(point) if point in POINTS else ""
    line = f"{word} {number:>3} {point.name:34} {verdict.seconds:6.1f} s  {verdict.reason}"
    return line if verdict.held else "\n    | ".join([line, *verdict.output.splitlines()[-LAST_LINES:]])


def main() -> int:
    """Run the points from the command line; return 1 if one fell."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.sweep", description=__doc__)
    parser.add_argument("--points", type=int, default=len(POINTS))
    parser.add_argument("--seed", type=int, default=0, help="of the order")
    parser.add_argument("--only", choices=[point.name for point in POINTS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the points and stop")
    args = parser.parse_args()
    chosen = [point for point in POINTS if point.name == args.only] or choose(POINTS, args.points, seed=args.seed)
    if args.list:
        for point in POINTS:
            print(f"{POINTS.index(point):3d} {point.name:34} ends: {', '.join(sorted(point.ends))}")
        return 0
    fell = 0
    for point in chosen:
        verdict = run_point(point)
        fell += not verdict.held
        print(describe(point, verdict), flush=True)
    print(f"{len(chosen)} points: {len(chosen) - fell} held, {fell} fell")
    return 1 if fell else 0


if __name__ == "__main__":
    sys.exit(main())
