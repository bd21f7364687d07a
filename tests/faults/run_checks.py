"""Checks on a run: its end, the records in its files, and its remains."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hwrl.run.report import read_metrics
from tests.support.train_run import Run

RAW = re.compile(r"Traceback \(most recent call last\)|StackTrace Information|Fatal Python error|\*\*\* SIG")
RAYLET = re.compile(r"^(\x1b\[\d+m)?\(raylet\).*\n(    .*\n)*", re.MULTILINE)
"""Ray's own report of a raylet that ended, with its last lines: Ray prints it on the driver of a cluster."""
ERROR = re.compile(r"^hwrl: \w+Error: .+\n(.*\n)*?  why: .+\n(.*\n)*?  fix: .+", re.MULTILINE)


class FellError(Exception):
    """The run broke a promise."""


def require(holds: bool, complaint: str) -> None:
    """Raise FellError unless ``holds``."""
    if not holds:
        raise FellError(complaint)


def name_end(status: int, output: str) -> str:
    """Return the kind of end for an exit status. Raises FellError if the output is not fit for people."""
    require(not RAW.search(RAYLET.sub("", output)), f"a raw traceback in the output (status {status})")
    if status == 1:
        require(bool(ERROR.search(output)), "status 1, and no error with what failed, why, and a fix")
    return {0: "done", 1: "error", 130: "interrupted", -signal.SIGKILL: "killed"}.get(status, f"status {status}")


def check_accounts(
    directory: Path,
    *,
    steps: int,
    batch: int,
    max_staleness: int,
    settled: Sequence[str] = ("sequence_numbers",),
    under_way: int = 0,
) -> None:
    """Raise FellError unless a complete run settled every prompt once, and trained on tokens of permitted ages.

    ``settled`` has the names of the kinds of settled prompts in the records; each must have some. A run that was ended
    may have ``under_way`` prompts, the last ones, that are not settled.
    """
    lines = read_metrics(directory)
    require([line["step"] for line in lines] == [*range(1, steps + 1)], "metrics.jsonl lacks or repeats a step")
    rows = [json.loads(row) for row in (directory / "trained_prompts.jsonl").read_text().splitlines()]
    kinds = {kind: [int(number) for row in rows for number in row.get(kind, [])] for kind in settled}
    require(all(kinds.values()), f"no prompts of a kind: {kinds}")
    require({*rows[0], *rows[-1]} <= {"step", *settled}, f"settled prompts of other kinds: {[*rows[0], *rows[-1]]}")
    counts = Counter(number for numbers in kinds.values() for number in numbers)
    lost = sorted(set(range(max(steps * batch, max(counts) + 1) - under_way)) - set(counts))
    twice = sorted(number for number, count in counts.items() if count > 1)
    require(not lost and not twice, f"prompts lost: {lost}; twice: {twice}")
    sizes = [len(row["sequence_numbers"]) for row in rows]
    require(sizes == [batch] * steps, f"prompts in the steps: {sizes}")
    ages = [value for line in lines for name, value in line.items() if name.startswith("staleness/")]
    require(all(0 <= age <= max_staleness for age in ages), f"ages of tokens from {min(ages)} to {max(ages)}")
    versions = [line["weights/version"] for line in lines]
    require(versions == sorted(versions), f"versions went back: {versions}")


def shared_memory(run: Run) -> set[Path]:
    """Return the files in shared memory that the run's processes have open."""
    shared, found = Path("/dev/shm"), set()
    for pid, _ in run.commands():
        with suppress(OSError):  # it has ended
            for link in os.listdir(f"/proc/{pid}/fd"):
                target = Path(os.readlink(f"/proc/{pid}/fd/{link}"))
                if target.is_relative_to(shared):
                    found.add(shared / target.relative_to(shared).parts[0])
    return found
