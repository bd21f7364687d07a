"""Counts and records every system call that changes a directory, and makes it fail; see ``interpose.c``."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["kill", "torn", "short", "full", "eio", "frozen"]
KINDS: tuple[Kind, ...] = ("kill", "torn", "short", "full", "eio", "frozen")
"""Faults at a call. kill: the process is killed before it. torn: killed after it, or after half of a write.

short: a write does half and reports so, as the system allows (the next write, if the call is none). full: the disk is
full from then on (half of a write fits, removing works). eio: the call fails once with EIO. frozen: the process is
stopped before it, until another process resumes it.
"""
KILLS: tuple[Kind, ...] = ("kill", "torn")

OPERATIONS = (
    "none", "create", "write", "resize", "sync", "mkdir", "rename", "remove", "link", "attributes", "escape",
)  # fmt: skip
_RECORD = struct.Struct("@iiiqq")


@dataclass(frozen=True)
class Fault:
    """A fault at call number ``at`` (from 0). ``whole_job`` kills the process group instead of the process."""

    kind: Kind
    at: int
    whole_job: bool = False

    @property
    def kills(self) -> bool:
        """Whether it ends a process."""
        return self.kind in KILLS

    def __str__(self) -> str:
        return f"{self.kind}{'-job' if self.whole_job else ''}@{self.at}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Parse a fault: ``kill-job@17``."""
        kind, _, at = text.partition("@")
        named = KINDS[KINDS.index(kind.removesuffix("-job"))]
        return cls(named, int(at), whole_job=kind.endswith("-job"))


@dataclass(frozen=True)
class Operation:
    """A recorded call: ``to`` for a rename, ``offset`` and ``data`` for a write.

    For other calls ``offset`` is the new length of a truncated file, and -1 otherwise.
    """

    name: str
    path: Path
    to: Path | None
    offset: int
    data: bytes


class _State(ctypes.Structure):
    _fields_ = [
        ("calls", ctypes.c_int64),
        ("at", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("whole_job", ctypes.c_int32),
        ("armed", ctypes.c_int32),
        ("fired", ctypes.c_int32),
        ("full", ctypes.c_int32),
        ("trace_fd", ctypes.c_int32),
        ("escapes", ctypes.c_int64),
    ]


class WatchedDisk:
    """The changes of processes below ``directory``, an absolute path without symbolic links.

    Made in a parent; a child of :func:`os.fork` that is to be watched calls :meth:`enter`, for good. Its threads and
    its own children are watched with it, on one count, which the parent can read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._state = _State.from_buffer(mmap.mmap(-1, ctypes.sizeof(_State)))
        self._state.trace_fd = -1
        self._library = _library()  # built here, once, and not in every child

    def enter(self, *, trace: Path | None = None) -> None:
        """Watch this process from now on; with ``trace``, append its calls there."""
        if trace is not None:
            self._state.trace_fd = os.open(trace, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        error = self._library.interpose(os.fsencode(self.directory), ctypes.byref(self._state))
        if error:
            raise OSError(error, os.strerror(error))

    def arm(self, fault: Fault | None = None) -> None:
        """Count from 0, and inject ``fault``."""
        self._state.calls = 0
        self._state.full = self._state.fired = 0
        self._state.at = -1 if fault is None else fault.at
        if fault is not None:
            self._state.kind, self._state.whole_job = KINDS.index(fault.kind), fault.whole_job
        self._state.armed = 1

    def disarm(self) -> None:
        """Let every call pass, uncounted; a full disk has room again."""
        self._state.armed = self._state.full = 0

    @property
    def calls(self) -> int:
        """How many calls were counted."""
        return int(self._state.calls)

    @property
    def fired(self) -> bool:
        """Whether the fault came to pass."""
        return bool(self._state.fired)

    @property
    def escapes(self) -> int:
        """How often the directory may have been changed without a system call. Such changes are not seen."""
        return int(self._state.escapes)


def read_trace(path: Path) -> list[Operation]:
    """Return the recorded calls, in order."""
    return list(_records(path.read_bytes()))


def _records(data: bytes) -> Iterator[Operation]:
    start = 0
    while start < len(data):
        code, path_nbytes, to_nbytes, offset, data_nbytes = _RECORD.unpack_from(data, start)
        start += _RECORD.size
        ends = [start + path_nbytes, start + path_nbytes + to_nbytes, start + path_nbytes + to_nbytes + data_nbytes]
        path, to = os.fsdecode(data[start : ends[0]]), os.fsdecode(data[ends[0] : ends[1]])
        yield Operation(OPERATIONS[code], Path(path), Path(to) if to else None, offset, data[ends[1] : ends[2]])
        start = ends[2]


@functools.cache
def why_unavailable() -> str | None:
    """Return why processes cannot be watched on this machine; None if they can."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return f"system calls are intercepted on Linux on x86-64 only, not {sys.platform} on {platform.machine()}"
    if shutil.which("cc") is None:
        return "there is no C compiler (cc)"
    if not _SECCOMP.exists() or "trap" not in _SECCOMP.read_text():
        return "this kernel has no seccomp filters"
    return None


_SECCOMP = Path("/proc/sys/kernel/seccomp/actions_avail")


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as directory:
        built = Path(directory) / "interpose.so"
        source = Path(__file__).with_name("interpose.c")
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", built, source], check=True)
        return ctypes.CDLL(str(built))
