"""A fault at any change of the disk by a join leaves the parts, and the earlier checkpoints, whole."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, find_checkpoints, join_parts
from hwrl.checkpoint.manifest import verify_files
from hwrl.comm import Group
from hwrl.errors import CheckpointError
from hwrl.testing.processes import run_processes
from tests.crash.disk import Fault, Kind, WatchedDisk, why_unavailable
from tests.crash.sweep import prepare_process
from tests.support.two_nodes import BACKEND, TRACKER, disk, on_ranks, open_manager, save

KINDS: tuple[Kind, ...] = ("kill", "full", "eio")

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def _save_part(group: Group, directory: Path) -> None:
    with open_manager(group, directory) as manager:
        save(manager, group, 2)


def _whole_steps(directory: Path) -> list[int]:
    """Return the complete steps, after verifying them. No new directory is incomplete."""
    complete, skipped = find_checkpoints(directory)
    assert all((one.path / "mine").exists() for one in skipped), skipped
    for info in complete:
        verify_files(info, info.manifest.files)
    return [info.step for info in complete]


def _join_everywhere(rank: int, home: Path, kinds: tuple[Kind, ...]) -> int:
    """Meet a fault at each change of the disk, of one of ``kinds`` in turn; return how many changes there are."""
    prepare_process()
    sources, fresh, out, at = [disk(home, node) for node in (0, 1)], home / "fresh", home / "out", 0
    while True:
        kind = kinds[at % len(kinds)]
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(fresh, out)
        ended = _join_in_child(home, sources, out, Fault(kind, at))
        where = f"{kind} at change {at}"
        for source in sources:
            assert _whole_steps(source) == [2], where
        there = _whole_steps(out)
        assert there[0] == 1 and int((out / TRACKER).read_text()) in there, where
        if ended == "untouched":
            return at
        assert ended == ("killed" if kind == "kill" else "refused" if there == [1] else "told of the rest"), where
        if there == [1]:
            assert kind == "kill" or not list(out.glob(".tmp_*")), where
            assert join_parts(sources, out) == 2, where
        CheckpointManager(out, backend=BACKEND).close()
        assert _whole_steps(out) == [1, 2] and int((out / TRACKER).read_text()) == 2, where
        assert not list(out.glob(".tmp_*")), where
        assert len(list(out.glob(".broken_global_step_2.*/mine"))) == 1, where
        at += 1


def _join_in_child(home: Path, sources: list[Path], out: Path, fault: Fault) -> str:
    watched = WatchedDisk(home)
    if (child := os.fork()) == 0:
        watched.enter()
        watched.arm(fault)
        try:
            join_parts(sources, out)
        except CheckpointError as exc:
            os._exit(4 if "it is complete in" in exc.why else 3)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not watched.fired:
        assert status == 0
        return "untouched"
    return {-signal.SIGKILL: "killed", 3: "refused", 4: "told of the rest"}[status]


@pytest.mark.parametrize(
    "kinds", [KINDS, *[pytest.param((kind,), marks=pytest.mark.extended) for kind in KINDS]], ids="-".join
)
def test_wherever_a_join_ends_the_parts_and_what_was_there_are_whole(tmp_path: Path, kinds: tuple[Kind, ...]) -> None:
    on_ranks(_save_part, 2, tmp_path)
    with CheckpointManager(tmp_path / "fresh", backend=BACKEND) as manager:
        manager.save(1, {"weight": torch.ones(3)})
    (tmp_path / "fresh" / "global_step_2").mkdir()
    (tmp_path / "fresh" / "global_step_2" / "mine").write_text("not complete, and not to be lost")
    assert run_processes(_join_everywhere, 1, tmp_path, kinds, timeout_s=2900)[0] > 30
