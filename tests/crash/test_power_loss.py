"""An acknowledged step survives a power cut at any moment, on a disk that keeps only synced content, and on ext4."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from hwrl.testing.processes import run_processes
from tests.crash.disk import Fault, WatchedDisk, read_trace, why_unavailable
from tests.crash.managed import Managed
from tests.crash.matrix import Subject
from tests.crash.power import Power, survivals
from tests.crash.references import DeletesEarly, Reference, ReferenceSession
from tests.crash.sweep import prepare_process

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


class RenamesUnsynced(ReferenceSession):
    """A directory beside, one rename, then the old one removed; whole at every kill, and nothing is ever synced."""

    def save(self, step: int) -> None:
        draft, old = self.home / "tmp", self._steps()
        draft.mkdir()
        torch.save({"weight": torch.full((64,), float(step))}, draft / "model.pt")
        draft.rename(self.home / f"step_{step}")
        for path in old:
            shutil.rmtree(path)

    def resume(self) -> int | None:
        newest = max(self._steps(), key=lambda path: int(path.name[5:]), default=None)
        if newest is None:
            return None
        (says,) = set(torch.load(newest / "model.pt")["weight"].tolist())
        return int(says)

    def _steps(self) -> list[Path]:
        return list(self.home.glob("step_*"))


class TorchAlone(ReferenceSession):
    """torch's own writer, a directory a step: it syncs its metadata file before Python's buffer is flushed."""

    def save(self, step: int) -> None:
        save({"weight": torch.full((64,), float(step))}, checkpoint_id=self.home / f"step_{step}", no_dist=True)

    def resume(self) -> int | None:
        newest = max(self.home.glob("step_*"), key=lambda path: int(path.name[5:]), default=None)
        if newest is None:
            return None
        state = {"weight": torch.zeros(64)}
        load(state, checkpoint_id=newest, no_dist=True)
        return int(state["weight"][0])


def _save_in_child(subject: Subject, home: Path, trace: Path, *, steps: int) -> dict[int, int]:
    """Save steps from 1 on in a forked process; return how many calls had been made when each was acknowledged."""
    disk, read, write = WatchedDisk(home), *os.pipe()
    if (child := os.fork()) == 0:
        disk.enter(trace=trace)
        disk.arm()
        with subject.open(home, rank=0, life="", timeout_s=600) as session:
            for step in range(1, steps + 1):
                session.save(step)
                os.write(write, f"{step} {disk.calls}\n".encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as lines:
        acknowledged = {int(step): int(calls) for step, calls in map(str.split, lines)}
    assert os.waitpid(child, 0)[1] == 0
    return acknowledged


def _cut_everywhere(
    rank: int, work: Path, subject: Subject, steps: int = 3, random_count: int = 3
) -> tuple[int, list[str]]:
    """Return the number of possible disks after a power cut, and the errors of those without an acknowledged step."""
    prepare_process()
    home, left, trace = work / "home", work / "left", work / "trace"
    home.mkdir()
    acknowledged = _save_in_child(subject, home, trace, steps=steps)
    shutil.rmtree(home)
    home.mkdir()
    power, cuts, lost = Power(home), 0, []
    for number, operation in enumerate(read_trace(trace), start=1):
        power.run(operation)
        at_least = max((step for step, calls in acknowledged.items() if calls <= number), default=0)
        for survival in survivals(number, random_count=random_count):
            power.cut(left, survival)
            cuts += 1
            if wrong := _find_wrong(subject, left, at_least):
                lost.append(f"after call {number}, {operation.name} {operation.path.name}: {wrong}")
            shutil.rmtree(left)
    return cuts, lost


def _find_wrong(subject: Subject, left: Path, at_least: int) -> str:
    try:
        with subject.open(left, rank=0, life="", timeout_s=600) as session:
            step = session.resume()
    except BaseException as exc:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return f"{type(exc).__name__}: {exc}"[:300] if at_least else ""
    return "" if (step or 0) >= at_least else f"found {step}, and {at_least} was acknowledged"


@pytest.mark.parametrize(
    ("keep", "steps", "random_count"),
    [
        (1, 2, 1),  # the second save removes the first checkpoint
        pytest.param(1, 3, 3, marks=pytest.mark.extended),
        pytest.param(3, 4, 3, marks=pytest.mark.extended),
    ],
)
def test_no_legal_disk_lacks_an_acknowledged_step(tmp_path: Path, keep: int, steps: int, random_count: int) -> None:
    subject = Managed(async_save=False, keep=keep)
    cuts, lost = run_processes(_cut_everywhere, 1, tmp_path, subject, steps, random_count, timeout_s=5900)[0]
    assert cuts > 300
    assert not lost, "\n".join(lost)


@pytest.mark.parametrize("order", [DeletesEarly, RenamesUnsynced, TorchAlone])
def test_orders_that_sync_too_little_are_found_out(tmp_path: Path, order: type[ReferenceSession]) -> None:
    _, lost = run_processes(_cut_everywhere, 1, tmp_path, Reference(order), timeout_s=5900)[0]
    assert lost


# -- a real file system ---------------------------------------------------------------------------------------------

_CLONE_NEWNS = 0x20000


def _why_no_mounts() -> str | None:
    if os.geteuid() != 0:
        return "only root may mount an image"
    missing = [tool for tool in ("mkfs.ext4", "mount", "umount") if shutil.which(tool) is None]
    return f"there is no {missing[0]}" if missing else None


def _sh(*words: str | Path) -> None:
    subprocess.run(words, check=True, capture_output=True)


def _mount_privately() -> None:
    """Give this process mounts of its own. They end with it. OSError if this is not allowed."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    _sh("mount", "--make-rprivate", "/")


class _Image:
    """A fresh ext4 in a file, mounted. A copy of the file lacks the changes still in the kernel's memory."""

    def __init__(self, work: Path) -> None:
        self._work, self._file, self.home = work, work / "image", work / "mounted"
        self.home.mkdir(exist_ok=True)
        with self._file.open("wb") as file:
            file.truncate(24 << 20)
        _sh("mkfs.ext4", "-q", "-F", self._file)
        _sh("mount", "-o", "loop", self._file, self.home)

    def close(self) -> None:
        _sh("umount", self.home)

    def look_at_copy(self, look: Callable[[Path], str]) -> str:
        copy, place = self._work / "copy", self._work / "looked at"
        shutil.copyfile(self._file, copy)
        place.mkdir(exist_ok=True)
        _sh("mount", "-o", "loop", copy, place)
        try:
            return look(place)
        finally:
            _sh("umount", place)


def _cut_image_over_time(rank: int, work: Path, moments_s: list[float]) -> list[str] | str:
    prepare_process()
    try:
        _mount_privately()
        image = _Image(work)
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"nothing can be mounted here: {exc}"
    subject, wrong = Managed(async_save=True, keep=1), []
    with subject.open(image.home, rank=0, life="", timeout_s=600) as session:
        for step in (1, 2):
            session.save(step)
        begin_s = time.monotonic()
        for moment_s in moments_s:
            time.sleep(max(0.0, begin_s + moment_s - time.monotonic()))  # the test is about time itself
            wrong.append(image.look_at_copy(lambda place: _find_wrong(subject, place, 2)))
    image.close()
    return wrong


def _cut_image_at_calls(rank: int, work: Path, stride: int) -> list[str] | str:
    prepare_process()
    try:
        _mount_privately()
    except (OSError, subprocess.CalledProcessError) as exc:
        return f"nothing can be mounted here: {exc}"
    subject, wrong = Managed(async_save=False, keep=1), []
    for at in range(0, 40, stride):
        image = _Image(work)
        _kill_second_save(subject, image.home, at)
        wrong.append(image.look_at_copy(lambda place: _find_wrong(subject, place, 1)))
        image.close()
    return wrong


def _kill_second_save(subject: Subject, home: Path, at: int) -> None:
    disk = WatchedDisk(home)
    if (child := os.fork()) == 0:
        disk.enter()
        with subject.open(home, rank=0, life="", timeout_s=600) as session:
            session.save(1)
            disk.arm(Fault("kill", at))
            session.save(2)
        os._exit(0)
    os.waitpid(child, 0)


@pytest.mark.skipif(_why_no_mounts() is not None, reason=str(_why_no_mounts()))
@pytest.mark.parametrize(
    ("cut", "argument"), [(_cut_image_over_time, [0, 3, 7, 12, 20]), (_cut_image_at_calls, 5)], ids=["times", "calls"]
)
def test_the_image_of_a_mounted_disk_holds_an_acknowledged_step(
    tmp_path: Path, cut: Callable[..., Any], argument: Any
) -> None:
    wrong = run_processes(cut, 1, tmp_path, argument, timeout_s=5900)[0]
    if isinstance(wrong, str):
        pytest.skip(wrong)
    assert len(wrong) >= 5
    assert not any(wrong), wrong
