"""Nodes with disks of their own: a checkpoint is complete when all nodes have committed it, and never a mix."""

import ctypes
import errno
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from hwrl.checkpoint import CheckpointManager, DurableFS, LocalShards, find_checkpoints, join_parts
from hwrl.cli import main
from hwrl.comm import Group
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from tests.support.two_nodes import BACKEND, TRACKER, disk, on_ranks, open_manager, resume, save, state_of

_NEW_MOUNTS, _RECURSIVE, _PRIVATE, _BIND = 0x20000, 16384, 1 << 18, 4096  # of linux/sched.h and linux/mount.h


# -- saving and resuming -------------------------------------------------------------------------------------------


def _save_three(group: Group, directory: Path, async_save: bool) -> list[int]:
    with open_manager(group, directory, async_save=async_save, max_ckpt_to_keep=2) as manager:
        for step in (1, 2, 3):
            save(manager, group, step)
        return [info.step for info in manager.checkpoints()]


def _resume(group: Group, directory: Path) -> int | None:
    with open_manager(group, directory) as manager:
        return resume(manager, group)


def _errors_of(group: Group, directory: Path) -> str:
    with open_manager(group, directory) as manager, pytest.raises(CheckpointError) as caught:
        resume(manager, group)
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize("async_save", [False, True])
def test_each_node_holds_its_ranks_part_and_all_resume_the_same_step(tmp_path: Path, async_save: bool) -> None:
    assert on_ranks(_save_three, 4, tmp_path, async_save) == [[2, 3]] * 4
    for node, ranks in enumerate(([0, 1], [2, 3])):
        parts, skipped = find_checkpoints(disk(tmp_path, node))
        assert [(info.step, info.manifest.node, info.manifest.nodes) for info in parts] == [(2, node, 2), (3, node, 2)]
        files = set(parts[-1].manifest.files)
        assert files == {f"__{rank}_0.distcp" for rank in ranks} | {"layout.json", "extra.json"} and not skipped
        assert (disk(tmp_path, node) / TRACKER).read_text() == "3"
        assert {path.name for path in disk(tmp_path, node).glob(".*")} == {".hwrl.lock"}
    assert on_ranks(_resume, 4, tmp_path) == [3] * 4


def _save_and_look(group: Group, directory: Path) -> list[bool]:
    found: list[bool] = []

    def look(_: Any) -> None:
        old, deadline = disk(directory.parent, 1) / "global_step_1", time.monotonic() + 1.0
        while old.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        found.append(old.exists())

    with open_manager(group, directory, max_ckpt_to_keep=1) as manager:
        save(manager, group, 1)
        manager.save(2, state_of(group, 2), after_commit=look)
        return [*found, (directory / "global_step_1").exists()]


def test_no_node_removes_a_checkpoint_before_after_commit_has_returned(tmp_path: Path) -> None:
    assert on_ranks(_save_and_look, 2, tmp_path) == [[True, False], [False]]


def test_two_ranks_resume_what_four_saved_as_each_finds_its_rows_on_its_node(tmp_path: Path) -> None:
    on_ranks(_save_rows, 4, tmp_path)
    assert on_ranks(_load_rows, 2, tmp_path) == [[0.0, 1.0], [2.0, 3.0]]


def _rows(first: int, count: int) -> dict[str, Any]:
    return {
        "rows": LocalShards((4,), torch.float32, {(first,): torch.arange(first, first + count, dtype=torch.float32)})
    }


def _save_rows(group: Group, directory: Path) -> None:
    with open_manager(group, directory) as manager:
        manager.save(1, _rows(group.rank, 1))


def _load_rows(group: Group, directory: Path) -> list[float]:
    state = _rows(2 * group.rank, 2)
    state["rows"].pieces[(2 * group.rank,)].zero_()
    with open_manager(group, directory) as manager:
        assert manager.resume(state) is not None
    found: list[float] = state["rows"].pieces[(2 * group.rank,)].tolist()
    return found


def test_a_rank_whose_part_is_on_another_nodes_disk_is_told_so(tmp_path: Path) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    disk(tmp_path, 0).rename(tmp_path / "moved")
    disk(tmp_path, 1).rename(disk(tmp_path, 0))
    (tmp_path / "moved").rename(disk(tmp_path, 1))
    for rank, text in enumerate(on_ranks(_errors_of, 2, tmp_path)):
        assert "step 3 cannot be loaded on" in text and "this disk lacks some of 'divided'" in text
        assert f"only the part of node {1 - rank} (of 2 nodes)" in text and "hwrl checkpoints join" in text


def test_one_disk_under_two_paths_is_one_node(tmp_path: Path) -> None:
    disk(tmp_path, 0).mkdir()
    disk(tmp_path, 1).symlink_to(disk(tmp_path, 0))
    assert on_ranks(_save_three, 2, tmp_path, False) == [[2, 3]] * 2
    assert [info.manifest.nodes for info in find_checkpoints(disk(tmp_path, 0))[0]] == [1, 1]


def _save_in_a_mount_of_its_own(group: Group, directory: Path) -> int | None:
    libc = ctypes.CDLL(None, use_errno=True)
    place = directory.parent / "checkpoints"
    if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _RECURSIVE | _PRIVATE, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if libc.mount(bytes(directory), bytes(place), None, _BIND, None):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    _save_three(group, place, False)
    return _resume(group, place)


def test_nodes_are_told_apart_where_their_paths_are_the_same(tmp_path: Path) -> None:
    for path in (disk(tmp_path, 0), disk(tmp_path, 1), tmp_path / "checkpoints"):
        path.mkdir()
    try:
        assert on_ranks(_save_in_a_mount_of_its_own, 2, tmp_path) == [3, 3]
    except PermissionError as exc:
        pytest.skip(f"needs the right to mount: {exc}")
    assert [find_checkpoints(disk(tmp_path, node))[0][-1].manifest.node for node in (0, 1)] == [0, 1]
    assert not list((tmp_path / "checkpoints").iterdir())


def _save_and_load_own_names(group: Group, directory: Path) -> list[float]:
    def stage(value: float) -> dict[str, torch.Tensor]:
        return {f"stage{group.rank // 2}.{group.rank}": torch.full((2,), value), "same": torch.full((1,), value)}

    state = stage(-1.0)
    with open_manager(group, directory) as manager:
        manager.save(1, stage(5.0), rank_extra={"rank": group.rank})
        resumed = manager.resume(state)
    assert resumed is not None and resumed.rank_extras == [{"rank": rank} for rank in range(group.size)]
    return [float(tensor.sum()) for tensor in state.values()]


def test_names_of_some_ranks_are_resumed_where_they_were_saved(tmp_path: Path) -> None:
    assert on_ranks(_save_and_load_own_names, 4, tmp_path) == [[10.0, 5.0]] * 4


# -- one node's directory by itself --------------------------------------------------------------------------------


def _checkpoints(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["checkpoints", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_the_commands_say_that_a_directory_is_one_nodes_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    there = disk(tmp_path, 1)
    for command in ("ls", "verify"):
        assert _checkpoints(capsys, command, there).count("only the part of node 1 of 2") == 2
    assert main(["checkpoints", "export", str(there), str(tmp_path / "out"), "--model", "unread"]) != 0
    assert "hwrl checkpoints join" in capsys.readouterr().err
    (there / TRACKER).write_text("2")  # as if killed before it announced step 3: node 0 may lack it
    assert "kept [2, 3]" in _checkpoints(capsys, "prune", there, "--keep", 1)
    assert (there / TRACKER).read_text() == "2"


def test_parts_are_joined_into_a_checkpoint_that_any_ranks_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    here, there, whole = disk(tmp_path, 0), disk(tmp_path, 1), tmp_path / "whole"
    shutil.rmtree(there / "global_step_3")
    assert "joined step 2" in _checkpoints(capsys, "join", here, there, "--out", whole)
    assert "is whole" in _checkpoints(capsys, "verify", whole) and "part of" not in _checkpoints(capsys, "ls", whole)
    rows = torch.zeros(2, 3)
    state = {"divided": LocalShards((2, 3), rows.dtype, {(0, 0): rows}), "same": torch.zeros(3), "n": 0}
    with CheckpointManager(whole, backend=BACKEND) as manager:
        found = manager.resume(state)
        assert found is not None and (found.step, len(found.rank_extras), state["n"]) == (2, 2, 2)
        assert torch.equal(rows, torch.tensor([[2.0] * 3, [3.0] * 3]))
        manager.save(3, state)
    for step in (2, 3):
        dcp_to_torch_save(whole / f"global_step_{step}", tmp_path / "as_torch_saves")
        seen = torch.load(tmp_path / "as_torch_saves", weights_only=True)
        assert torch.equal(seen["divided"], rows) and seen.keys() == state.keys()
    with pytest.raises(CheckpointNotFoundError, match="step 3 does not have all its parts"):
        join_parts([here, there], tmp_path / "other", step=3)
    with (there / "global_step_2" / "__1_0.distcp").open("r+b") as file:
        file.write(b"?")
    with pytest.raises(CheckpointCorruptError, match="does not match its hash"):
        join_parts([here, there], tmp_path / "other")


# -- errors on one node --------------------------------------------------------------------------------------------


class Full(DurableFS):
    """Has no room for the file ``name`` of step 2: its sync fails."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.name == self._name and "step_2" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _fill_one_disk(group: Group, directory: Path, name: str) -> str:
    fs = Full(name) if group.rank == 1 else None
    with open_manager(group, directory, fs=fs, async_save=True) as manager:
        save(manager, group, 1)
        with pytest.raises(CheckpointSaveError) as caught:
            save(manager, group, 2)
        assert not list(directory.glob(".tmp*"))
        save(manager, group, 3)
    return str(caught.value)


@pytest.mark.parametrize("name", ["__1_0.distcp", "MANIFEST.json"])
def test_a_full_disk_of_one_node_fails_the_save_on_all_and_the_next_works(tmp_path: Path, name: str) -> None:
    texts = on_ranks(_fill_one_disk, 2, tmp_path, name)
    assert "step 2 was not saved\n  why: rank 1: OSError: [Errno 28]" in texts[0]
    assert "step 2 was not saved\n  why: OSError: [Errno 28]" in texts[1]
    assert [[info.step for info in find_checkpoints(disk(tmp_path, node))[0]] for node in (0, 1)] == [[1, 3], [1, 3]]


def _resume_and_save(group: Group, directory: Path, step: int) -> int | None:
    with open_manager(group, directory, max_ckpt_to_keep=2) as manager:
        found = resume(manager, group)
        save(manager, group, step)
    return found


def test_what_is_damaged_on_one_node_is_passed_over_and_saved_again_on_all(tmp_path: Path) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    with (disk(tmp_path, 1) / "global_step_3" / "__1_0.distcp").open("r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"?")
    assert on_ranks(_resume_and_save, 2, tmp_path, 3) == [2, 2]
    for node in (0, 1):
        assert len(list(disk(tmp_path, node).glob(".broken_global_step_3.*"))) == 1
    assert on_ranks(_resume, 2, tmp_path) == [3, 3]


def test_a_node_that_lost_its_disk_is_named_and_training_does_not_start_afresh(tmp_path: Path) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    shutil.rmtree(disk(tmp_path, 1))
    for text in on_ranks(_errors_of, 2, tmp_path):
        assert text.startswith("CheckpointNotFoundError") and "of 2 nodes, only these have it: 0 (" in text
    assert [info.step for info in find_checkpoints(disk(tmp_path, 0))[0]] == [2, 3]


def test_a_first_step_that_one_node_committed_was_never_there(tmp_path: Path) -> None:
    on_ranks(_save_three, 2, tmp_path, False)
    for left in (*disk(tmp_path, 0).glob("*_2"), *disk(tmp_path, 1).glob("global_step_*")):
        shutil.rmtree(left)  # as if step 3 was the first, and node 1 was killed before its commit
    for node in (0, 1):
        (disk(tmp_path, node) / TRACKER).unlink()
    assert on_ranks(_resume, 2, tmp_path) == [None, None]
