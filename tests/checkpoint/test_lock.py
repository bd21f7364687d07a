"""One process writes to a directory of checkpoints. Others are refused, with its name. A dead process holds no lock."""

import fcntl
import logging
import os
import shutil
import signal
import socket
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from hwrl.checkpoint import CheckpointManager, DurableFS, hold_for_reading
from hwrl.checkpoint.lock import LOCK_NAME, DirectoryLock, find_owner
from hwrl.errors import CheckpointCorruptError, CheckpointError
from hwrl.testing.processes import Processes
from hwrl_cpu import INFO, CpuBackend


def _manager(directory: Path) -> CheckpointManager:
    return CheckpointManager(directory, backend=CpuBackend(INFO))


def test_a_second_writer_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    begin = datetime.now(UTC).replace(microsecond=0)
    process = rf"process {os.getpid()} on {socket.gethostname()}"
    owner = rf"this process has another open manager on it: {process} has held the lock since (\S+)"
    with _manager(tmp_path):
        with pytest.raises(CheckpointError, match=f"(?s)already has a writer.*{owner}") as caught:
            _manager(tmp_path)
        since = datetime.fromisoformat(caught.value.why.split()[-1])
        assert begin <= since <= datetime.now(UTC)
    _manager(tmp_path).close()


def _own_until_killed(rank: int, directory: Path) -> None:
    with _manager(directory):
        if os.fork() == 0:  # a worker may outlive its parent, for example one that loads data
            (directory.parent / "worker").write_text(str(os.getpid()))
            signal.pause()
        signal.pause()


def test_the_lock_of_a_dead_owner_is_free_though_its_worker_lives(tmp_path: Path) -> None:
    home = tmp_path / "home"
    with Processes(_own_until_killed, 1, home) as processes:
        while not (tmp_path / "worker").exists() or not (tmp_path / "worker").read_text():
            os.sched_yield()
        with pytest.raises(CheckpointError, match="already has a writer"):
            _manager(home)
        processes.kill(0)
        processes.wait(0)
        worker = int((tmp_path / "worker").read_text())
        os.kill(worker, 0)
        _manager(home).close()
        os.kill(worker, signal.SIGKILL)


def test_a_link_in_the_place_of_the_lock_is_refused_and_what_it_points_to_is_left_alone(tmp_path: Path) -> None:
    victim, home = tmp_path / "victim", tmp_path / "home"
    victim.write_text("precious")
    home.mkdir()
    (home / LOCK_NAME).symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"(?s)cannot keep checkpoints.*symbolic link"):
        _manager(home)
    assert victim.read_text() == "precious"


def test_a_lock_file_that_says_nonsense_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).write_text("{]")
    lock = DirectoryLock(tmp_path)
    (tmp_path / LOCK_NAME).write_text("{]")
    with pytest.raises(CheckpointError, match="has not written its name"):
        DirectoryLock(tmp_path)
    for nonsense in (b"\xff", b"[" * 4000):
        (tmp_path / LOCK_NAME).write_bytes(nonsense)
        assert find_owner(tmp_path) == "its owner has not written its name into the lock file"
    lock.close()


def test_with_patience_a_manager_waits_for_the_end_of_the_writer_before_it(tmp_path: Path) -> None:
    before = _manager(tmp_path)

    class EndsTheWriter(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            assert f"process {os.getpid()} on " in record.getMessage()
            before.close()

    logger, handler = logging.getLogger("hwrl.checkpoint"), EndsTheWriter()
    logger.addHandler(handler)
    try:
        CheckpointManager(tmp_path, backend=CpuBackend(INFO), lock_wait_s=600.0).close()
    finally:
        logger.removeHandler(handler)


def test_who_only_asks_for_the_owner_keeps_nobody_out(tmp_path: Path) -> None:
    _manager(tmp_path).close()
    asking = (tmp_path / LOCK_NAME).open()
    fcntl.flock(asking, fcntl.LOCK_SH)  # as find_owner does, here for longer than it takes
    threading.Timer(0.2, asking.close).start()
    _manager(tmp_path).close()
    assert asking.closed


class Reading(DurableFS):
    """Tries to begin reading a checkpoint in the moment before it is removed."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    def before(self, operation: str, path: Path) -> None:
        if operation == "rename" and path.name.startswith("global_step"):
            with (path / "MANIFEST.json").open("rb") as manifest:
                try:
                    fcntl.flock(manifest, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.refused.append(path.name)


def test_no_reader_begins_while_a_checkpoint_is_removed(tmp_path: Path) -> None:
    fs = Reading()
    with CheckpointManager(tmp_path, backend=CpuBackend(INFO), fs=fs, max_ckpt_to_keep=1) as manager:
        for step in (1, 2):
            manager.save(step, {"count": step})
        assert [info.step for info in manager.checkpoints()] == [2]
    assert fs.refused == ["global_step_1"]


@pytest.mark.parametrize("again", [False, True], ids=["removed", "saved again"])
def test_a_reader_that_locks_after_the_removal_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    with _manager(tmp_path) as manager:
        manager.save(1, {"count": 1})
        [info] = manager.checkpoints()
    flock = fcntl.flock

    def remove_first(file: Any, operation: int) -> None:
        moved = info.path.rename(tmp_path / "moved")
        if again:
            shutil.copytree(moved, info.path)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    with (
        pytest.raises(CheckpointCorruptError, match="replaced while it was being opened" if again else "No such file"),
        hold_for_reading(info),
    ):
        raise AssertionError("it holds nothing")
