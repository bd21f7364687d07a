"""The account of a run on a disk that is full or fails at any moment, and after a power cut at any moment."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl.errors import RunDirectoryError
from hwrl.run.report import RunReport, read_metrics
from hwrl.testing.processes import run_processes
from tests.crash.disk import Fault, WatchedDisk, read_trace, why_unavailable
from tests.crash.power import Power, survivals

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))

FIGURES = {"reward/mean": 0.5, "staleness/mean": 1.0}


def _steps(home: Path) -> Iterator[int]:
    """Do two steps as a run does them; yield a step when a checkpoint may rely on it."""
    report = RunReport(home, say=lambda text: None)
    for step in (1, 2):
        report.add(step, FIGURES, prompts=[step])
        report.sync()
        yield step
        report.amend({"checkpoint/blocked_s": 0.5})


def _in_child(home: Path, *, fault: Fault | None, trace: Path | None = None) -> tuple[list[list[int]], str, int]:
    """Return the steps that could be relied on, each with the calls made until then; the error, and all calls."""
    disk, (read, write) = WatchedDisk(home), os.pipe()
    if (child := os.fork()) == 0:
        disk.enter(trace=trace)
        disk.arm(fault)
        try:
            for step in _steps(home):
                os.write(write, f"{step} {disk.calls}\n".encode())
        except BaseException as exc:  # noqa: BLE001 - its kind is what the parent looks at
            os.write(write, f"{type(exc).__name__}\n".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        words = [line.split() for line in lines]
    assert os.waitpid(child, 0)[1] == 0
    relied_on = [[int(word) for word in pair] for pair in words if len(pair) == 2]
    return relied_on, next((word[0] for word in words if len(word) == 1), ""), disk.calls


def _reports(home: Path, *, last_step: int) -> list[str]:
    """Return what a resume from ``last_step`` says."""
    said: list[str] = []
    RunReport(home, say=said.append, resume_step=last_step)
    return said


def _fail_everywhere(rank: int, work: Path) -> list[str]:
    """Return what is wrong after an error of the disk at any call."""
    list(_steps(work / "warm"))  # imports
    _, _, calls = _in_child(_made(work / "whole"), fault=None)
    wrong = []
    for fault in [Fault(kind, at) for kind in ("full", "eio") for at in range(calls)]:
        home = _made(work / str(fault))
        relied_on, error, _ = _in_child(home, fault=fault)
        last_step = max((step for step, _ in relied_on), default=0)
        said = _reports(home, last_step=last_step)
        if error not in ("", RunDirectoryError.__name__) or said or len(read_metrics(home)) != last_step:
            wrong.append(f"{fault}: {error}, {said}")
    return wrong


def _cut_everywhere(rank: int, work: Path) -> tuple[int, list[str]]:
    """Return how many power cuts were tried, and the lines that a checkpoint relied on and that are lost after one."""
    list(_steps(work / "warm"))
    home, left, trace = _made(work / "home"), work / "left", work / "trace"
    relied_on, _, _ = _in_child(home, fault=None, trace=trace)
    shutil.rmtree(home)
    power, cuts, lost = Power(_made(home)), 0, []
    for number, operation in enumerate(read_trace(trace), start=1):
        power.run(operation)
        last_step = max((step for step, calls in relied_on if calls <= number), default=0)
        for survival in survivals(number):
            power.cut(left, survival)
            cuts += 1
            lost += [f"after call {number}: {text}" for text in _reports(left, last_step=last_step)]
            shutil.rmtree(left)
    return cuts, lost


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def test_whatever_the_disk_refuses_is_one_kind_of_error_and_loses_no_line_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    assert run_processes(_fail_everywhere, 1, tmp_path)[0] == []


def test_a_power_cut_loses_no_line_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "warm").mkdir()
    cuts, lost = run_processes(_cut_everywhere, 1, tmp_path)[0]
    assert cuts > 100
    assert lost == []
