"""A saving process is killed, or its disk fails, at each kind of change of the disk: a whole checkpoint is there."""

import errno
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS
from hwrl.errors import CheckpointSaveError
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)

# One point of each kind, in the order in which a save of step 2 with one kept checkpoint meets them.
POINTS = [
    ("mkdir", ".tmp_global_step_2*"),
    ("create", "__0_0.distcp"),
    ("write", "__0_0.distcp"),
    ("sync", "__0_0.distcp"),
    ("create", ".metadata.tmp"),
    ("rename", ".metadata.tmp"),
    ("write", "layout.json"),
    ("sync", "MANIFEST.json"),
    ("sync_directory", ".tmp_global_step_2*"),
    ("rename", ".tmp_global_step_2*"),
    ("sync_directory", "home"),
    ("write", ".tmp_latest_checkpointed_iteration.txt"),
    ("rename", ".tmp_latest_checkpointed_iteration.txt"),
    ("rename", "global_step_1"),
    ("remove", ".trash_global_step_1*"),
]
COMMITTED_FROM = POINTS.index(("sync_directory", "home"))


class Faulty(DurableFS):
    """Fails at the first change that matches: an error of the disk, or the end of the process if ``error`` is None."""

    def __init__(self, operation: str, pattern: str, *, error: int | None) -> None:
        super().__init__()
        self.operation, self.pattern, self.error = operation, pattern, error
        self.armed = False

    def before(self, operation: str, path: Path) -> None:
        if not self.armed or operation != self.operation or not path.match(self.pattern):
            return
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        self.armed = False
        raise OSError(self.error, os.strerror(self.error or 0), str(path))


def _state(step: int) -> dict[str, Any]:
    return {"weight": torch.full((1000,), float(step)), "count": step}


def _save_two(number: int, home: Path, *, async_save: bool) -> None:
    fs = Faulty(*POINTS[number], error=None)
    with CheckpointManager(home, max_ckpt_to_keep=1, async_save=async_save, backend=BACKEND, fs=fs) as manager:
        manager.save(1, _state(1), extra={"step": 1})
        manager.wait()
        fs.armed = True
        manager.save(2, _state(2), extra={"step": 2})


def _kill_at_each_point(rank: int, directory: Path, async_save: bool) -> list[int]:
    """Fork a process for each point (this one has imported torch and run nothing); return how each ended."""
    ends: list[int] = []
    for number in range(len(POINTS)):
        if (child := os.fork()) == 0:
            _save_two(number, directory / str(number) / "home", async_save=async_save)
            os._exit(0)
        ends.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    return ends


def _check_recovery(home: Path, *, oldest: int, newest: int = 2) -> None:
    """Resume, save once more, resume again; nothing is left over."""
    state = _state(-1)
    with CheckpointManager(home, max_ckpt_to_keep=1, backend=BACKEND) as manager:
        assert not [path for path in home.iterdir() if path.name.startswith((".tmp", ".trash"))]
        resumed = manager.resume(state)
        assert resumed is not None and oldest <= resumed.step <= newest
        assert resumed.skipped == []
        assert resumed.extra == {"step": resumed.step}
        assert state["count"] == resumed.step and set(state["weight"].tolist()) == {float(resumed.step)}
        manager.save(3, _state(3))
        assert [info.step for info in manager.checkpoints()] == [3]
        assert (home / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize("async_save", [False, True])
def test_a_kill_at_any_point_leaves_a_whole_checkpoint(tmp_path: Path, async_save: bool) -> None:
    ends = run_processes(_kill_at_each_point, 1, tmp_path, async_save)[0]
    assert ends == [-signal.SIGKILL] * len(POINTS), "every point is met"
    for number in range(len(POINTS)):
        _check_recovery(tmp_path / str(number) / "home", oldest=2 if number >= COMMITTED_FROM else 1)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("number", range(len(POINTS)))
def test_a_failing_disk_leaves_the_previous_one_and_the_next_save_works(tmp_path: Path, number: int, code: int) -> None:
    home, fs = tmp_path / "home", Faulty(*POINTS[number], error=code)
    with CheckpointManager(home, max_ckpt_to_keep=1, backend=BACKEND, fs=fs) as manager:
        manager.save(1, _state(1), extra={"step": 1})
        fs.armed = True
        with pytest.raises(CheckpointSaveError, match=rf"(?s)step 2 .*{os.strerror(code)}"):
            manager.save(2, _state(2), extra={"step": 2})
        newest = manager.latest()
        assert newest is not None and newest.step == (2 if number >= COMMITTED_FROM else 1)
        assert not fs.armed
        assert not list(home.glob(".tmp_global_step*")), "nothing is left to the next start"
    _check_recovery(home, oldest=1)
