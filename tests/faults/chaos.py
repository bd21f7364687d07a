"""A chaos run: `make chaos MINUTES=30`. A fault every 20 s at random hits a run on two hosts.

A second run, undisturbed and with as many steps, shows the reward to expect.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hwrl.run.demo import write_lines
from tests.faults.chaos_faults import CPUS, FAULTS, Chaos, possible_faults, prepare_machines, supervise
from tests.faults.run_checks import FellError, check_accounts, name_end, require
from tests.support.host_network import HostNetwork, HostNetworkError, why_unavailable
from tests.support.host_run import HostRun, finish, ray_hosts, stop_driver, wait_until_no_actors
from tests.support.speed import slow

REPLICAS, RANKS, BATCH, SAVE_EVERY = 4, 2, 8, 5
EVERY_S = 20.0
HUNG_S = slow(150.0)
"""The longest time without a step: a lost host is noticed after 10 s, and the trainer may start twice."""
_MOST_STEPS = 20_000
_LAST_STEPS = 20
_WINDOW = 50
_NOISE = 0.02
"""The reward may differ by so much beside three standard errors: the runs draw different samples."""
_CANNOT_RUN = 77
_PROMPTS = 4096
_LEARNING_RATE = 3e-4
"""Lower than the demo's, for smaller batches."""
WORDS = [
    "goals={}",
    f"train.batch_groups={BATCH}",
    f"train.ranks={RANKS}",
    "train.max_restarts=100000",
    f"rollout.replicas={REPLICAS}",
    "rollout.max_restarts=100000",
    "rollout.n=8",
    f"optimizer.learning_rate={_LEARNING_RATE}",
    "rollout.max_running=64",
    f"rollout.group_timeout_s={slow(20)}",
    "async_training.staleness_threshold=1",
    f"weights.timeout_s={slow(6)}",
    f"checkpoint.save_every_steps={SAVE_EVERY}",
    "eval.every_steps=0",
    "eval.prompts=64",
    f"timeouts.heartbeat_s={slow(10)}",
    f"timeouts.start_s={slow(90)}",
    f"timeouts.trainer_s={slow(40)}",
    f"timeouts.evaluation_s={slow(60)}",
]
FEW_WORDS = [*WORDS, "train.ranks=1", "rollout.replicas=2", f"timeouts.heartbeat_s={slow(6)}"]
"""The same with three processes."""


@dataclass
class Record:
    """One fault: when, what the run logged first, and how long until a whole step had passed."""

    name: str
    at_s: float
    told_after_s: float | None = None
    told: str = ""
    step_after_s: float | None = None


@dataclass
class _Injector:
    """Injects the faults ``names`` into a run for ``seconds``, and watches its steps."""

    chaos: Chaos
    names: Iterator[str]
    seconds: float
    began_s: float = field(default_factory=time.monotonic)
    records: list[Record] = field(default_factory=list)

    def inject_all(self) -> None:
        while (left_s := self.began_s + self.seconds - time.monotonic()) > 0:
            next_s = time.monotonic() + min(EVERY_S, left_s)
            self._inject(next(self.names), until_s=next_s)
        self._await_step(Record("the end", self._now_s()), until_s=time.monotonic() + HUNG_S)

    def _now_s(self) -> float:
        return time.monotonic() - self.began_s

    def _inject(self, name: str, *, until_s: float) -> None:
        act, lasts_s = FAULTS[name]
        record = Record(name, self._now_s())
        step, length = self._step(), len(self.chaos.run.output())
        if (undo := act(self.chaos)) is None:
            return  # the process was being replaced: another fault is drawn
        self.records.append(record)
        undo_s: float | None = time.monotonic() + lasts_s
        while time.monotonic() < until_s or undo_s is not None or record.step_after_s is None:
            if undo_s is not None and time.monotonic() >= undo_s:
                undo()
                undo_s = None
            self._look(record, step, length)
            if undo_s is None:
                supervise(self.chaos)
            time.sleep(0.25)
        print(_row(record), flush=True)

    def _await_step(self, record: Record, *, until_s: float) -> None:
        step, length = self._step(), len(self.chaos.run.output())
        while record.step_after_s is None and time.monotonic() < until_s:
            self._look(record, step, length)
            time.sleep(0.25)

    def await_all_replicas(self) -> None:
        """Return when all replicas run again: the continuation of the run needs both hosts."""
        until_s = time.monotonic() + HUNG_S
        while self.chaos.run.last_metrics()["rollout/replicas"] < REPLICAS:
            require(self.chaos.run.process.poll() is None, "the run ended while it waited for a replica")
            require(time.monotonic() < until_s, f"after {HUNG_S:.0f} s a replica is still missing")
            supervise(self.chaos)
            time.sleep(0.25)

    def _step(self) -> int:
        return int(self.chaos.run.last_metrics().get("step", 0))

    def _look(self, record: Record, step: int, length: int) -> None:
        since_s = self._now_s() - record.at_s
        require(
            self.chaos.run.process.poll() is None,
            f"the run ended with status {self.chaos.run.process.returncode} after {record.name!r}",
        )
        require(record.step_after_s is not None or since_s < HUNG_S, f"no step for {since_s:.0f} s: {record.name}")
        text = self.chaos.run.output()[length:]
        if record.told_after_s is None:
            told = [line for line in text.splitlines() if " ended (" in line or "trainer died (" in line]
            if told:
                record.told_after_s, record.told = since_s, told[0].strip()
        went_back = "resumed after step" in text  # then the steps count anew
        now = self._step()
        if record.step_after_s is None and (now >= step + 2 or (went_back and now > _resumed(text))):
            record.step_after_s = since_s


def _resumed(text: str) -> int:
    return int(text.rpartition("resumed after step ")[2].split()[0])


def _row(record: Record) -> str:
    told = "" if record.told_after_s is None else f"{record.told_after_s:.1f}"
    step = "" if record.step_after_s is None else f"{record.step_after_s:.1f}"
    return f"| {record.at_s:5.0f} | {record.name} | {told} | {step} | {record.told[:110]} |"


TITLES = "| at s | fault | named after s | a whole step after s | first line about it |\n|---|---|---|---|---|"


def chaos_run(seconds: float, *, seed: int) -> tuple[int, Rewards, list[Record]]:
    """Run with faults for ``seconds``; return the steps, the rewards, and the faults.

    Raises FellError if the run breaks a promise.
    """
    draw, faults = random.Random(seed), possible_faults()
    names = (draw.choice(faults) for _ in itertools.count())
    with _started(WORDS, draw) as (chaos, run, work):
        injector = _Injector(chaos, names, seconds)
        injector.inject_all()
        injector.await_all_replicas()
        steps = int(run.metrics()[-1]["step"])
        again = finish(chaos.network, work, run, WORDS)
        name_end(130, run.output())
        check_accounts(run.directory, steps=len(again.metrics()), batch=BATCH, max_staleness=1)
        wait_until_no_actors(chaos.network)
        return steps, Rewards.of(run, steps), injector.records


def short_run(seconds: float, *, names: Sequence[str]) -> list[Record]:
    """Run the faults ``names`` in turn on fewer processes, and end the run; return the faults.

    The run is not continued: the prompts that were under way at its end are missing. Raises FellError if it breaks a
    promise.
    """
    with _started(FEW_WORDS, random.Random(0)) as (chaos, run, _):
        injector = _Injector(chaos, itertools.cycle(names), seconds)
        injector.inject_all()
        stop_driver(chaos.network)
        status = run.wait(timeout_s=600.0)
        require(name_end(status, run.output()) == "interrupted", f"it ended with status {status}")
        steps = len(run.metrics())
        check_accounts(run.directory, steps=steps, batch=BATCH, max_staleness=1, under_way=3 * BATCH)
        wait_until_no_actors(chaos.network)
        return injector.records


def _prepare(network: HostNetwork, work: Path) -> None:
    _let_copy(network, work)
    prepare_machines(network, work)


def _let_copy(_: HostNetwork, work: Path) -> None:
    """Make the answers the prompts' digits in their own order.

    A run that sorts may stop learning at many rewards, so equal runs do not end alike (docs/faults.md). A copy is
    learned one position after the other, and to the end.
    """
    for path in (work / "train.jsonl", work / "eval.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        write_lines(path, [{**row, "answer": row["prompt"].removesuffix(">")} for row in rows])


@contextmanager
def _started(words: list[str], draw: random.Random) -> Iterator[tuple[Chaos, HostRun, Path]]:
    """Yield a run with ``words`` on two hosts, after its first steps. If it fails, print its last lines."""
    with ray_hosts(count=2, cpus=CPUS, prompts=_PROMPTS, prepare=_prepare) as (network, work):
        run = HostRun(network.hosts[0], work, *words, f"train.steps={_MOST_STEPS}", **network.environment)
        try:
            run.wait_for_step(2)
            print(TITLES, flush=True)
            yield Chaos(network, run, draw), run, work
        except (FellError, AssertionError):
            print("\n".join(run.output().splitlines()[-40:]))
            raise
        finally:
            run.close()


def undisturbed_run(steps: int) -> Rewards:
    """Run ``steps`` steps without faults; return the rewards."""
    with ray_hosts(count=2, cpus=CPUS, prompts=_PROMPTS, prepare=_let_copy) as (network, work):
        run = HostRun(network.hosts[0], work, *WORDS, f"train.steps={_MOST_STEPS}", **network.environment)
        try:
            run.wait_for_step(steps, timeout_s=3600.0)
            return Rewards.of(run, steps)
        finally:
            stop_driver(network)
            with suppress(Exception):
                run.wait(timeout_s=600.0)
            run.close()


@dataclass(frozen=True)
class Rewards:
    """The mean reward of each step of a run."""

    steps: tuple[float, ...]

    @classmethod
    def of(cls, run: HostRun, steps: int) -> Rewards:
        return cls(tuple(line["reward/mean"] for line in run.metrics()[:steps]))

    @property
    def last(self) -> float:
        """The mean of the last ``_LAST_STEPS`` steps."""
        return statistics.mean(self.steps[-_LAST_STEPS:])

    @property
    def error(self) -> float:
        """The standard error of :attr:`last`."""
        last = self.steps[-_LAST_STEPS:]
        return statistics.stdev(last) / math.sqrt(len(last))

    def __str__(self) -> str:
        """Return the means of each ``_WINDOW`` steps."""
        windows = (self.steps[begin : begin + _WINDOW] for begin in range(0, len(self.steps), _WINDOW))
        return " ".join(f"{statistics.mean(window):.2f}" for window in windows)


def judge(seconds: float, *, seed: int) -> str:
    """Do both runs; return the result as text. Raises FellError if the run with faults breaks a promise."""
    began_s = time.monotonic()
    steps, disturbed, records = chaos_run(seconds, seed=seed)
    undisturbed = undisturbed_run(steps)
    print(f"reward with faults: {disturbed}\nundisturbed: {undisturbed}", flush=True)
    noise = _NOISE + 3 * (disturbed.error**2 + undisturbed.error**2) ** 0.5
    result = (
        f"{len(records)} faults in {seconds:.0f} s, {steps} steps, every prompt once, no hang; reward "
        f"{disturbed.last:.3f}, undisturbed {undisturbed.last:.3f}, noise {noise:.3f}; the slowest step after a fault "
        f"came after {max(record.step_after_s or 0.0 for record in records):.1f} s; "
        f"{time.monotonic() - began_s:.0f} s in all"
    )
    require(abs(disturbed.last - undisturbed.last) <= noise, f"the faults changed the reward: {result}")
    return result


def main() -> int:
    """Do a chaos run from the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (why := why_unavailable()) is not None:
        print(f"chaos: {why}", file=sys.stderr)
        return _CANNOT_RUN
    try:
        print(judge(60 * args.minutes, seed=args.seed))
    except (FellError, AssertionError, HostNetworkError) as exc:
        print(f"fell: {exc} (seed {args.seed})")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
