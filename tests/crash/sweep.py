"""Runs many points of the matrix on hwrl's checkpoints, on all cores: ``make crash-test POINTS=10000``."""

from __future__ import annotations

import argparse
import itertools
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hwrl.store import serve_store, store_address
from hwrl.testing.processes import run_processes
from tests.crash.cycles import Tally, run_cycles
from tests.crash.managed import Managed
from tests.crash.matrix import Matrix, Point, Subject

MEMORY = Path("/dev/shm")
CYCLES = 100


@dataclass
class Outcome:
    """How many points were met, by what befell them, and what was broken."""

    points: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Count ``other``'s points with ours."""
        self.points += other.points
        self.broken += other.broken


def sweep(points: int, *, seed: int, timeout_s: float = 3600.0) -> Outcome:
    """Meet ``points`` points: single faults, each at most once, and pairs of faults in two lives."""
    outcome, store = Outcome(), serve_store()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as work:
        cores = os.cpu_count() or 1
        arguments = (Path(work), store_address(store), points, seed, cores)
        for share in run_processes(_share, cores, *arguments, timeout_s=timeout_s):
            outcome.add(share)
    return outcome


def managed_subjects(store: str) -> list[Subject]:
    """Return what is swept: sync and async, one and three steps kept, one and two ranks."""
    alone = [Managed(async_save=mode, keep=keep) for mode in (False, True) for keep in (1, 3)]
    pairs = [Managed(async_save=mode, keep=keep, ranks=2, store=store) for mode, keep in ((False, 3), (True, 1))]
    return [*alone, *pairs]


def _cycle(rank: int, home: Path, seed: int) -> Tally:
    prepare_process()
    return run_cycles(home, cycles=CYCLES, seed=seed)


def run_points(matrix: Matrix, points: list[Point]) -> Outcome:
    """Run ``points`` one after the other."""
    outcome = Outcome()
    for point in points:
        outcome.points[_name(point)] += 1
        for complaint in matrix.run(point):
            outcome.broken.append(f"{point}: {complaint}")
            print(outcome.broken[-1], flush=True)
    return outcome


def prepare_process() -> None:
    """Make this process fit to be forked from, and quiet."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's store prints a C++ stack for every rank that dies


def _share(rank: int, work: Path, store: str, count: int, seed: int, shares: int) -> Outcome:
    prepare_process()
    (work / str(rank)).mkdir()
    matrix = Matrix(managed_subjects(store), work / str(rank))
    points = list(matrix.every_point())
    random.Random(seed).shuffle(points)
    pairs = matrix.random_points(points, seed=seed)
    wanted = itertools.chain.from_iterable(zip(points, pairs, strict=False))  # as many of both, then pairs
    return run_points(matrix, list(itertools.islice(itertools.chain(wanted, pairs), rank, count, shares)))


def _name(point: Point) -> str:
    return point.first.kind + (f", then {point.second.kind}" if point.second else "")


def main() -> int:
    """Sweep, print what is broken when it is found, and what was met; return 1 if something is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    begin_s = time.monotonic()
    outcome = sweep(args.points, seed=args.seed)
    for name, count in sorted(outcome.points.items()):
        print(f"{count:6}  {name}")
    print(f"{outcome.points.total():6}  points in {time.monotonic() - begin_s:.0f} s, {len(outcome.broken)} broken")
    with tempfile.TemporaryDirectory() as home:
        tally = run_processes(_cycle, 1, Path(home), args.seed, timeout_s=3600)[0]
    print(
        f"{tally.kills:6}  kills of a training run: of {tally.trained} prompts, {len(tally.skipped)} skipped,", end=" "
    )
    print(f"{len(tally.twice)} trained more than once")
    return 1 if outcome.broken or tally.skipped or tally.twice else 0


if __name__ == "__main__":
    sys.exit(main())
