"""A run with a disk error at any moment, and its records after a power cut at any moment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hwrl.checkpoint import DurableFS
from hwrl.errors import RunDirectoryError, with_notes
from hwrl.run.interrupts import Interrupts
from hwrl.run.report.run_report import RunReport
from hwrl.testing.processes import run_processes
from tests.crash.disk import Fault, Kind, WatchedDisk, read_trace, why_unavailable
from tests.crash.power import Power, survivals
from tests.support.two_step_run import CHECKPOINT, StandInFleet, train

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def _train(home: Path) -> None:
    train(home, StandInFleet(home, DurableFS()), Interrupts())


def _in_child(home: Path, *, fault: Fault | None, trace: Path | None = None) -> tuple[str, int]:
    """Run in a forked process; return the error with its notes, and how many calls were made."""
    disk, (read, write) = WatchedDisk(home), os.pipe()
    if (child := os.fork()) == 0:
        disk.enter(trace=trace)
        disk.arm(fault)
        try:
            _train(home)
        except BaseException as exc:  # noqa: BLE001 - the parent checks its class
            os.write(write, f"{type(exc).__name__}: {with_notes(exc)}".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        error = lines.read()
    assert os.waitpid(child, 0)[1] == 0
    return error, disk.calls


def _resumed(home: Path) -> tuple[int, list[str]]:
    """Return the step of the checkpoint, and the messages of a resume about the records."""
    said: list[str] = []
    checkpoint = home / CHECKPOINT
    step = int(checkpoint.read_text()) if checkpoint.exists() else 0
    report = RunReport(home, log=said.append, resume_step=step)
    report.close()
    return step, said


def _fail_everywhere(rank: int, work: Path, kinds: list[list[Kind]]) -> list[str]:
    """Return the wrong results after a disk error at any call, of each of the ``kinds`` for calls in turn."""
    _train(_made(work / "first"))  # imports the modules
    _, calls = _in_child(_made(work / "whole"), fault=None)
    wrong = []
    for fault in [Fault(kind, at) for at in range(calls) for kind in kinds[at % len(kinds)]]:
        home = _made(work / str(fault))
        error, _ = _in_child(home, fault=fault)
        kind = error.partition(":")[0]
        step, said = _resumed(home)
        may_lack = kind == RunDirectoryError.__name__ and "was saved in " in error
        if kind not in ("", "RunDirectoryError", "CheckpointSaveError") or (said and not may_lack):
            wrong.append(f"{fault}: step {step}, {error}, {said}")
    return wrong


def _cut_everywhere(rank: int, work: Path) -> tuple[int, list[str]]:
    """Return the number of power cuts, and the lines missing for the surviving checkpoints."""
    _train(_made(work / "first"))
    home, left, trace = _made(work / "home"), work / "left", work / "trace"
    assert _in_child(home, fault=None, trace=trace)[0] == ""
    shutil.rmtree(home)
    power, cuts, lost = Power(_made(home)), 0, []
    for number, operation in enumerate(read_trace(trace), start=1):
        power.run(operation)
        for survival in survivals(number):
            power.cut(left, survival)
            cuts += 1
            lost += [f"after call {number}: {text}" for text in _resumed(left)[1]]
            shutil.rmtree(left)
    return cuts, lost


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


@pytest.mark.parametrize(
    "kinds", [[["full"], ["eio"]], pytest.param([["full", "eio"]], marks=pytest.mark.extended)], ids=["in turn", "both"]
)
def test_whatever_the_disk_refuses_is_one_kind_of_error_and_loses_no_line_of_a_checkpoint(
    tmp_path: Path, kinds: list[list[Kind]]
) -> None:
    assert run_processes(_fail_everywhere, 1, tmp_path, kinds)[0] == []


def test_a_power_cut_loses_no_line_of_a_checkpoint(tmp_path: Path) -> None:
    cuts, lost = run_processes(_cut_everywhere, 1, tmp_path)[0]
    assert cuts > 100
    assert lost == []
