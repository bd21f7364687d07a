"""Checks on a run: its end, the records in its files, and its remains."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from contextlib import suppress
from pathlib import Path

from hwrl.run.report import read_metrics
from tests.support.train_run import Run

RAW = re.compile(r"Traceback \(most recent call last\)|StackTrace Information|Fatal Python error|\*\*\* SIG")
ERROR = re.compile(r"^hwrl: \w+Error: .+\n(.*\n)*?  why: .+\n(.*\n)*?  fix: .+", re.MULTILINE)


class FellError(Exception):
    """The run broke a promise."""


def require(holds: bool, complaint: str) -> None:
    """Raise FellError unless ``holds``."""
    if not holds:
        raise FellError(complaint)


def name_end(status: int, output: str) -> str:
    """Return the kind of end for an exit status. Raises FellError if the output is not fit for people."""
    require(not RAW.search(output), f"a raw traceback in the output (status {status})")
    if status == 1:
        require(bool(ERROR.search(output)), "status 1, and no error with what failed, why, and a fix")
    return {0: "done", 1: "error", 130: "interrupted", -signal.SIGKILL: "killed"}.get(status, f"status {status}")


def check_accounts(directory: Path, *, steps: int, batch: int, max_staleness: int) -> None:
    """Raise FellError unless a complete run trained on every prompt once, on tokens of permitted ages."""
    lines = read_metrics(directory)
    require([line["step"] for line in lines] == [*range(1, steps + 1)], "metrics.jsonl lacks or repeats a step")
    rows = (directory / "trained_prompts.jsonl").read_text().splitlines()
    trained = Counter(number for row in rows for number in json.loads(row)["sequence_numbers"])
    lost = sorted(set(range(steps * batch)) - set(trained))
    twice = sorted(number for number, count in trained.items() if count > 1)
    require(not lost and not twice and trained.total() == steps * batch, f"prompts lost: {lost}; twice: {twice}")
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
