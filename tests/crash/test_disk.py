"""The harness sees every change of a directory, by any caller, and its faults have the described effects."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hwrl.testing.processes import run_processes
from tests.crash.disk import KINDS, Fault, WatchedDisk, read_trace, why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def _by_python(home: Path) -> None:
    with (home / "file").open("wb") as file:
        file.write(b"12345678")
        file.flush()
        os.fsync(file.fileno())
    (home / "file").rename(home / "other")
    (home / "inner").mkdir()
    (home / "inner" / "link").symlink_to("nowhere")
    shutil.rmtree(home / "inner")
    os.truncate(home / "other", 3)
    os.chmod(home / "other", 0o600)


def _by_libc(home: Path) -> None:
    libc = ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(os.fsencode(home / "file"), b"w"))
    libc.fputs(b"by the C library", stream)
    libc.fclose(stream)  # writes from inside of the library, where no preloaded library would notice


def _by_rust(home: Path) -> None:
    save_file({"weight": torch.ones(4)}, home / "model.safetensors")


def _by_cpp(home: Path) -> None:
    torch.save({"weight": torch.ones(4)}, home / "model.pt")


def _relatively(home: Path) -> None:
    os.chdir(home)
    Path("file").touch()
    Path("file").rename("other")


CHANGES: list[tuple[Callable[[Path], None], set[str]]] = [
    (_by_python, {"create", "write", "sync", "rename", "mkdir", "link", "remove", "resize", "attributes"}),
    (_by_libc, {"create", "write"}),
    (_by_rust, {"create", "write"}),
    (_by_cpp, {"create", "write"}),
    (_relatively, {"create", "rename"}),
]


def _in_child(disk: WatchedDisk, action: Callable[[], None], *, fault: Fault | None, trace: Path | None = None) -> int:
    if (child := os.fork()) == 0:
        disk.enter(trace=trace)
        disk.arm(fault)
        try:
            action()
        except OSError as exc:
            os._exit(exc.errno or 255)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _trace_all(rank: int, home: Path) -> list[tuple[int, int, int, list[str]]]:
    seen = []
    for number, (change, _) in enumerate(CHANGES):
        inside = home / str(number)
        inside.mkdir()
        disk, trace = WatchedDisk(inside), home / f"trace{number}"
        status = _in_child(disk, lambda: change(inside), fault=None, trace=trace)  # noqa: B023 - runs before the next turn
        seen.append((status, disk.escapes, disk.calls, [operation.name for operation in read_trace(trace)]))
    return seen


def test_every_change_is_seen_whoever_makes_it(tmp_path: Path) -> None:
    for (change, expected), (status, escapes, calls, names) in zip(
        CHANGES, run_processes(_trace_all, 1, tmp_path)[0], strict=True
    ):
        assert (status, escapes) == (0, 0), change
        assert set(names) >= expected, change
        assert calls == len(names)


def _write(home: Path) -> None:
    (home / "first").write_bytes(b"12345678")
    (home / "second").write_bytes(b"12345678")


def _meet_each_kind(rank: int, home: Path) -> dict[str, tuple[int, dict[str, int]]]:
    ends: dict[str, tuple[int, dict[str, int]]] = {}
    for kind in KINDS[:-1]:  # a frozen process does not end
        inside = home / kind
        inside.mkdir()
        disk = WatchedDisk(inside)
        status = _in_child(disk, lambda: _write(inside), fault=Fault(kind, 1))  # noqa: B023 - runs before the next turn
        assert disk.fired
        ends[kind] = status, {path.name: path.stat().st_size for path in sorted(inside.iterdir())}
    return ends


def test_faults_do_what_they_say(tmp_path: Path) -> None:
    assert run_processes(_meet_each_kind, 1, tmp_path)[0] == {
        "kill": (-signal.SIGKILL, {"first": 0}),
        "torn": (-signal.SIGKILL, {"first": 4}),
        "short": (0, {"first": 8, "second": 8}),
        "full": (errno.ENOSPC, {"first": 4}),
        "eio": (errno.EIO, {"first": 0}),
    }


def _write_through_memory(path: Path) -> None:
    torch.from_file(str(path), shared=True, size=1).fill_(7)


def _escape(rank: int, home: Path) -> int:
    (home / "file").write_bytes(b"1234")
    disk = WatchedDisk(home)
    assert _in_child(disk, lambda: _write_through_memory(home / "file"), fault=None) == 0
    return disk.escapes


def test_a_change_through_memory_is_reported_as_unseen(tmp_path: Path) -> None:
    assert run_processes(_escape, 1, tmp_path) == [1]
