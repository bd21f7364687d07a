"""A path is no proof of ownership: what a writer does after its directory was replaced, in real processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hwrl.checkpoint import TRACKER_NAME, CheckpointManager, DirectoryLock, DurableFS, find_checkpoints, share_lock
from hwrl.checkpoint.lock import LOCK_NAME, find_owner, read_lock
from hwrl.errors import CheckpointError, CheckpointSaveError
from hwrl_cpu import INFO, CpuBackend

OLD_WRITER = """
import json, sys
from pathlib import Path
from hwrl.checkpoint import CheckpointManager
from hwrl.errors import HwrlError
from hwrl_cpu import INFO, CpuBackend

work, names, answers = Path(sys.argv[1]), sys.argv[2].split(","), {}
managers = {
    (name, is_async): CheckpointManager(
        work / f"{name}-{is_async}" / "path", backend=CpuBackend(INFO), async_save=is_async, max_ckpt_to_keep=1
    )
    for name in names for is_async in (False, True)
}
for manager in managers.values():
    manager.save(1, {"count": 1})
    manager.wait()
print("saved", flush=True)
sys.stdin.readline()
for (name, is_async), manager in managers.items():
    told = []
    for step in (7, 8):
        try:
            manager.save(step, {"count": step})
            manager.wait()
        except HwrlError as exc:
            told.append(str(exc))
    try:
        manager.resume({"count": 0})
    except HwrlError as exc:
        told.append(str(exc))
    answers[f"{name}-{is_async}"] = told
print(json.dumps(answers), flush=True)
"""


def _manager(directory: Path, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, backend=CpuBackend(INFO), **options)


def _delete(path: Path) -> None:
    shutil.rmtree(path)


def _rename(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))


def _delete_lock(path: Path) -> None:
    (path / LOCK_NAME).unlink()


def _replace_lock(path: Path) -> None:
    (path / LOCK_NAME).unlink()
    (path / LOCK_NAME).touch()


def _switch_link(path: Path) -> None:
    """Make ``path``, a link, lead to another directory."""
    other = path.with_name("other")
    other.mkdir()
    path.unlink()
    path.symlink_to(other)


ACTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "delete": (_delete, "the directory was deleted; the path leads to another directory now"),
    "rename": (_rename, "the directory was renamed: its files are in {work}/elsewhere; the path leads to another"),
    "delete_lock": (_delete_lock, "was replaced, so another process owns the directory"),
    "replace_lock": (_replace_lock, "was replaced, so another process owns the directory"),
    "switch_link": (_switch_link, "a link in the path was changed: the files are in {work}/first; the path leads"),
    "delete_only": (_delete, "the directory was deleted: "),
    "rename_only": (_rename, "the directory was renamed: its files are in {work}/elsewhere: "),
    "delete_lock_only": (_delete_lock, "was deleted, so another process may own the directory"),
}


def _content(directory: Path) -> dict[str, object]:
    """Return the content of every file, and what changes with a file's place: its inode and the time of its change."""
    return {
        str(path.relative_to(directory)): (path.read_bytes() if path.is_file() else None, path.stat().st_ino)
        for path in sorted(directory.rglob("*"))
    } | {"": directory.stat().st_mtime_ns}


@pytest.mark.timeout(300)
def test_a_writer_that_wakes_in_another_runs_directory_changes_nothing_there_and_says_where_its_own_is(
    tmp_path: Path,
) -> None:
    works = {f"{name}-{is_async}": tmp_path / f"{name}-{is_async}" for name in ACTS for is_async in (False, True)}
    for name, work in works.items():
        work.mkdir()
        if name.startswith("switch_link"):
            (work / "first").mkdir()
            (work / "path").symlink_to(work / "first")
    command = [sys.executable, "-c", OLD_WRITER, str(tmp_path), ",".join(ACTS)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdin is not None and old.stdout is not None
        assert old.stdout.readline() == "saved\n"
        before = {}
        with contextlib.ExitStack() as stack:
            for name, work in works.items():
                act = name.partition("-")[0]
                ACTS[act][0](work / "path")
                if not act.endswith("_only"):
                    manager = stack.enter_context(_manager(work / "path"))
                    for step in (3, 4):  # two, of which the old writer would keep one
                        manager.save(step, {"count": 10 * step})
                before[name] = _content(work / "path") if (work / "path").exists() else None
            answers = json.loads(old.communicate("go\n")[0])
        for name, work in works.items():
            told = answers[name]
            assert len(told) == 3, (name, told)
            said = ACTS[name.partition("-")[0]][1].format(work=work)
            assert "was not saved" in told[0] and "was not saved" in told[1] and all(said in text for text in told), (
                told
            )
            assert (_content(work / "path") if (work / "path").exists() else None) == before[name], name


class Swapping(DurableFS):
    """Before its ``at``-th change, puts another run's directory in the place of ``path``."""

    def __init__(self, path: Path, at: int, other: Path) -> None:
        super().__init__()
        self._path, self._at, self._other, self.count = path, at, other, 0
        self.content: dict[str, object] = {}

    def before(self, operation: str, path: Path) -> None:
        if self.count == self._at:
            self._path.rename(self._path.with_name("elsewhere"))
            shutil.copytree(self._other, self._path)
            self.content = _content(self._path)
        self.count += 1


def test_a_directory_that_is_replaced_at_any_moment_of_a_save_stays_as_it_is(tmp_path: Path) -> None:
    with _manager(tmp_path / "other") as other:
        for step in (1, 2):
            other.save(step, {"count": 10 * step})
    at, saved = 0, 0
    while True:
        path = tmp_path / str(at) / "path"
        with _manager(path, max_ckpt_to_keep=1) as manager:
            manager.save(1, {"count": 1})
            manager.save(2, {"count": 2})
        fs = Swapping(path, at, tmp_path / "other")
        with contextlib.suppress(CheckpointError), _manager(path, max_ckpt_to_keep=1, fs=fs) as manager:
            manager.save(3, {"count": 3})
            saved += 1
        if not fs.content:
            break
        assert _content(path) == fs.content, f"after change {at}"
        assert not find_checkpoints(path.with_name("elsewhere"))[1]
        at += 1
    assert at > 15 and saved <= 3  # a swap after the last proof is too late to be noticed, and harmless


def test_a_process_that_shares_the_lock_stops_with_the_owner(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    lock = DirectoryLock(run)
    content = read_lock(run)
    assert content is not None
    share_lock(run, content)
    with _manager(run / "checkpoints") as manager:
        manager.save(1, {"count": 1})
        lock.close()
        code = f"from pathlib import Path; from hwrl.checkpoint import DirectoryLock; DirectoryLock(Path({str(run)!r}))"
        subprocess.run([sys.executable, "-c", code], check=True)  # the next run, in the same directory
        with pytest.raises(CheckpointSaveError, match=f"another process has written its name into {LOCK_NAME}"):
            manager.save(2, {"count": 2})
        with pytest.raises(CheckpointError, match="no longer the directory of this run"):
            share_lock(run, content)
        elsewhere = json.dumps({**json.loads(content), "host": "elsewhere"}).encode()
        is_held = pytest.raises(CheckpointError, match=f"process {os.getpid()} on ")  # so the directory is shared
        with is_held, contextlib.closing(DirectoryLock(run)):
            share_lock(run, elsewhere)
        share_lock(run, elsewhere)  # a disk of its own, with a file of an earlier run


# -- file systems without locks, other users, and what is no file ---------------------------------------------------


@pytest.fixture(params=[errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def without_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(file: Any, operation: int) -> None:
        raise OSError(request.param, os.strerror(request.param))

    monkeypatch.setattr(fcntl, "flock", refuse)
    yield


@pytest.mark.usefixtures("without_flock")
def test_without_file_locks_a_directory_is_refused_or_taken_over_at_the_users_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(CheckpointError, match=r"cannot be locked[\s\S]*no file locks[\s\S]*HWRL_UNLOCKED=1"):
        _manager(tmp_path / "run")
    monkeypatch.setenv("HWRL_UNLOCKED", "1")
    with _manager(tmp_path / "run", max_ckpt_to_keep=1) as old:
        old.save(1, {"count": 1})
        old.save(2, {"count": 2})
        assert [info.step for info in old.checkpoints()] == [2]
        assert "is used without a lock: HWRL_UNLOCKED=1" in caplog.text
        with _manager(tmp_path / "run") as new:
            new.save(3, {"count": 3})
            with pytest.raises(CheckpointSaveError, match=f"another process has written its name into {LOCK_NAME}"):
                old.save(4, {"count": 4})
            assert [info.step for info in new.checkpoints()] == [2, 3]
            resumed = new.resume({"count": 0})
            assert resumed is not None and resumed.step == 3
    assert find_owner(tmp_path / "run") is None


def test_what_hwrl_creates_is_closed_to_other_users_and_what_the_user_created_keeps_its_mode(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2750)
    (shared / LOCK_NAME).touch(0o644)  # of an earlier hwrl
    for directory, mode in ((shared, 0o2750), (tmp_path / "new" / "run", 0o700)):
        with _manager(directory) as manager:
            manager.save(1, {"count": 1})
        assert stat.S_IMODE(directory.stat().st_mode) == mode
        assert stat.S_IMODE((directory / LOCK_NAME).stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_who_reads_the_directory_cannot_keep_its_owner_out(tmp_path: Path) -> None:
    place = Path("/tmp") / f"hwrl-{os.getpid()}-{os.urandom(4).hex()}"  # the parents of tmp_path are closed
    place.mkdir(0o755)
    try:
        _manager(place).close()
        if (child := os.fork()) == 0:
            os.setuid(65534)
            try:
                fcntl.flock(os.open(place / LOCK_NAME, os.O_RDONLY), fcntl.LOCK_EX)
            except PermissionError:
                os._exit(13)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 13
    finally:
        shutil.rmtree(place)


def _zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _endless(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 42)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plant", [os.mkfifo, _zero, _endless])
def test_no_name_in_the_directory_makes_a_writer_hang_or_read_without_end(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    plant(run / TRACKER_NAME)
    with _manager(run) as manager:
        manager.save(1, {"count": 1})
    assert (run / TRACKER_NAME).read_text() == "1" and not (run / TRACKER_NAME).is_symlink()
    (run / LOCK_NAME).unlink()
    plant(run / LOCK_NAME)
    assert find_owner(run) is None
    if plant is not _endless:  # that one is a file, and is taken over
        with pytest.raises(CheckpointError, match=r"not a regular file|symbolic link"):
            _manager(run)
