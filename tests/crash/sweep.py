"""Runs many points of the matrix on hwrl's checkpoints, on all cores: ``make crash-test POINTS=10000``."""

from __future__ import annotations

import argparse
import importlib
import itertools
import logging
import os
import random
import re
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from hwrl.comm.store import serve_store, store_address
from hwrl.testing.processes import run_processes
from tests.crash.cycles import Tally, run_cycles
from tests.crash.managed import Managed
from tests.crash.matrix import Matrix, Point, Result, Subject
from tests.crash.trainers import MakeTrainer, Megatron, fsdp2, write_model

MEMORY = Path("/dev/shm")
CYCLES = 100
REPORT_EVERY_S = 10.0
LIMIT_S = 86400.0
IN_EACH_LIFE = ("encodings.idna", "hwrl_cpu.gloo", "numpy.ma", "torch.utils.serialization")
"""Modules that are imported on first use: once here, and not in every life."""


STAGES = {
    "retain": r"/\.trash_|rename .*/global_step_",
    "announce": r"/\.tmp_latest_",
    "commit": r"rename .*/\.tmp_global_step_[^/]*$",
    "write": r"mkdir .*/\.tmp_global_step_[^/]*$|\.distcp$",
    "seal": r"/\.tmp_global_step_",
    "open": r"/\.hwrl\.lock$|/\.tmp_mark_",
}
"""The stages of a life with one save; a change that the pattern of none describes is in the stage of the one before."""


@dataclass
class Outcome:
    """The numbers of points, by subject, by stage of the save and by fault, and the broken promises."""

    points: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, point: Point, stage: str, result: Result) -> None:
        """Count ``point``; print its broken promises."""
        second = point.second.kind if result.met > 1 and point.second else "nothing"
        self.points[point.subject] += 1
        self.stages[stage] += 1
        self.faults[point.first.kind + (f", then {second}" if point.second else "")] += 1
        for complaint in result.broken:
            self.broken.append(f"{point}: {complaint}")
            print(self.broken[-1], flush=True)


# -- points ----------------------------------------------------------------------------------------------------------


def two_nodes(store: str) -> Subject:
    """Return FSDP2 on two nodes with disks of their own."""
    return Managed(fsdp2, name="fsdp2-nodes", async_save=False, keep=1, ranks=2, own_disks=True, store=store)


def few_subjects(store: str) -> list[Subject]:
    """Return FSDP2 on one rank, on two, and on two nodes, with every way to save."""
    return [
        two_nodes(store),
        Managed(fsdp2, name="fsdp2-1", async_save=False, keep=1),
        Managed(fsdp2, name="fsdp2-1", async_save=True, on_device=True, keep=3),
        Managed(fsdp2, name="fsdp2-2", async_save=True, keep=1, ranks=2, store=store),
        Managed(fsdp2, name="fsdp2-2", async_save=False, keep=3, ranks=2, store=store),
    ]


def all_subjects(store: str, model: Path) -> list[Subject]:
    """Return the subjects: FSDP2 and Megatron on one and on two ranks, sync and async, one and three steps kept.

    Asynchronous saves are staged on the host with one step kept, and on the device with three. One is on two nodes.
    """
    subjects: list[Subject] = [two_nodes(store)]
    for mode, keep in itertools.product((False, True), (1, 3)):
        split = ("tp2", 2) if keep == 1 else ("dp2", 1)  # two Megatron ranks share the layers, or the optimizer's state
        makes: list[tuple[str, MakeTrainer, int]] = [
            ("fsdp2-1", fsdp2, 1),
            ("fsdp2-2", fsdp2, 2),
            ("megatron-1", Megatron(model), 1),
            (f"megatron-{split[0]}", Megatron(model, tensor_parallel=split[1]), 2),
        ]
        for name, make, ranks in makes:
            on_device = mode and keep == 3
            subjects.append(
                Managed(make, name=name, async_save=mode, on_device=on_device, keep=keep, ranks=ranks, store=store)
            )
    return subjects


def points_of(matrix: Matrix, *, seed: int) -> Iterator[Point]:
    """Yield each single fault once, and after every two of them a pair of faults in two lives; then pairs for ever.

    The order is random, but for this: neighbours differ in the kind of fault, in the stage of the save, and in the
    subject. So the first few single faults have each of these about equally often.
    """
    every = list(matrix.every_point())
    print(f"{len(every)} single faults", flush=True)
    random.Random(seed).shuffle(every)
    pairs = matrix.random_points(every, seed=seed)
    for number, single in enumerate(_in_turns(matrix, every)):
        yield single
        if number % 2:
            yield next(pairs)
    yield from pairs


def _in_turns(matrix: Matrix, points: Sequence[Point]) -> Iterator[Point]:
    """Yield each of ``points`` once."""
    alike: dict[tuple[str, str], list[Point]] = defaultdict(list)
    for point in points:
        alike[str(point.first).partition("@")[0], stage_of(matrix, point)].append(point)
    faults, stages = sorted({fault for fault, _ in alike}), sorted({stage for _, stage in alike})
    used: Counter[str] = Counter()
    while any(alike.values()):
        for row, (number, fault) in itertools.product(range(len(stages)), enumerate(faults)):
            if left := alike[fault, stages[(row + number) % len(stages)]]:
                point = min(left, key=lambda one: used[one.subject])
                left.remove(point)
                used[point.subject] += 1
                yield point


def stage_of(matrix: Matrix, point: Point) -> str:
    """Return the stage of the save in which the first fault of ``point`` comes."""
    stage = "open"
    for operation in matrix.operations[point.subject, point.victim][: point.first.at + 1]:
        change = f"{operation.name} {operation.path}"
        stage = next((stage for stage, begins in STAGES.items() if re.search(begins, change)), stage)
    return stage


# -- running them ----------------------------------------------------------------------------------------------------


def prepare_process() -> None:
    """Make this process fit to be forked from, and quiet."""
    for module in IN_EACH_LIFE:
        importlib.import_module(module)
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch's store prints a C++ stack for every dead rank


def run_points(matrix: Matrix, points: Sequence[Point], *, workers: int) -> Outcome:
    """Run ``points`` on ``workers`` forked processes. After Ctrl-C no new point begins."""
    outcome, left, report = Outcome(), iter(points), _Report(len(points))
    interrupted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: interrupted.append(number))
    idle = [_Worker(matrix) for _ in range(min(workers, len(points)))]
    busy: dict[Connection, tuple[_Worker, Point]] = {}
    while True:
        while idle and not interrupted and (point := next(left, None)) is not None:
            worker = idle.pop()
            worker.pipe.send(point)
            busy[worker.pipe] = worker, point
        if not busy:
            break
        for pipe in wait(list(busy), REPORT_EVERY_S):
            assert isinstance(pipe, Connection), "nothing else was waited for"
            worker, point = busy.pop(pipe)
            outcome.add(point, stage_of(matrix, point), pipe.recv())
            idle.append(worker)
        report.tell(outcome)
    for worker in idle:
        worker.end()
    signal.signal(signal.SIGINT, before)
    return outcome


class _Worker:
    """A forked process. It runs points until :meth:`end`."""

    def __init__(self, matrix: Matrix) -> None:
        self.pipe, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                self.pipe.close()
                signal.signal(signal.SIGINT, signal.SIG_IGN)  # a begun point is completed
                for point in iter(theirs.recv, None):
                    theirs.send(matrix.run(point))
            finally:
                os._exit(1)
        theirs.close()

    def end(self) -> None:
        self.pipe.send(None)
        os.waitpid(self._pid, 0)


class _Report:
    """Says every few seconds how far it has come."""

    def __init__(self, count: int) -> None:
        self._count, self._began_s, self._told_s = count, time.monotonic(), time.monotonic()

    def tell(self, outcome: Outcome) -> None:
        now_s = time.monotonic()
        if now_s - self._told_s < REPORT_EVERY_S:
            return
        self._told_s = now_s
        done = outcome.points.total()
        rate = done / (now_s - self._began_s)
        left = f"{(self._count - done) / rate:.0f} s left" if done else "nobody knows how long"
        broken = f"{len(outcome.broken)} broken"
        print(f"{done} of {self._count} points, {rate:.1f} a second, {broken}, {left}", flush=True)


@dataclass(frozen=True)
class Plan:
    """``count`` points of ``seed``, from number ``start`` on; or ``only`` one. ``few`` subjects need no Megatron."""

    count: int
    few: bool = False
    seed: int = 0
    start: int = 0
    only: str | None = None

    def choose(self, matrix: Matrix) -> list[Point]:
        """Return the points."""
        if self.only is not None:
            return [Point.parse(self.only)]
        return list(itertools.islice(points_of(matrix, seed=self.seed), self.start, self.start + self.count))


def sweep(plan: Plan, *, timeout_s: float = LIMIT_S) -> Outcome:
    """Run the points of ``plan`` on all cores."""
    store = serve_store()
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as work:
        outcome: Outcome = run_processes(_sweep, 1, Path(work), store_address(store), plan, timeout_s=timeout_s)[0]
    return outcome


def _sweep(rank: int, work: Path, store: str, plan: Plan) -> Outcome:
    prepare_process()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    subjects = few_subjects(store) if plan.few else all_subjects(store, write_model(work / "model"))
    print(f"finding out what {len(subjects)} subjects write", flush=True)
    matrix = Matrix(subjects, work)
    workers = 2 * (os.cpu_count() or 1)  # every few wait, for a lost rank's deadline
    return run_points(matrix, plan.choose(matrix), workers=workers)


def _cycle(rank: int, home: Path, seed: int) -> Tally:
    prepare_process()
    return run_cycles(home, cycles=CYCLES, seed=seed)


def main() -> int:
    """Sweep; print broken promises at once, and the counts at the end. Return 1 if a promise is broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="leave out so many points of the seed")
    parser.add_argument("--only", metavar="POINT", help="run one point, by the text that a report begins with")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process of the points gets the signal, and ends with a report
    begin_s = time.monotonic()
    outcome = sweep(Plan(args.points, seed=args.seed, start=args.start, only=args.only))
    for counted in (outcome.points, outcome.stages, outcome.faults):
        for name, count in sorted(counted.items()):
            print(f"{count:6}  {name}")
    print(f"{outcome.points.total():6}  points in {time.monotonic() - begin_s:.0f} s, {len(outcome.broken)} broken")
    if args.only is not None or outcome.points.total() < args.points:  # one point was asked for, or it was stopped
        return 0 if args.only is not None and not outcome.broken else 1
    with tempfile.TemporaryDirectory() as home:
        tally = run_processes(_cycle, 1, Path(home), args.seed, timeout_s=LIMIT_S)[0]
    print(
        f"{tally.kills:6}  kills of a training run: of {tally.trained} prompts, {len(tally.skipped)} skipped,", end=" "
    )
    print(f"{len(tally.twice)} trained more than once")
    return 1 if outcome.broken or tally.skipped or tally.twice else 0


if __name__ == "__main__":
    sys.exit(main())
