"""The right to write in a directory, which one process has at a time and no dead process keeps."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from hwrl.errors import CheckpointError

LOCK_NAME = ".hwrl.lock"
_PATIENCE_S = 1.0  # for :func:`find_owner`, which may hold the lock for a moment


class DirectoryLock:
    """Held from its making until :meth:`close`, until nothing refers to it, or until this process ends in whatever way.

    It is a lock of the kernel on a file; what stands in the file is only told to whom it is refused. The file is never
    removed: two processes could then hold locks on two files of that name. A forked child does not hold the lock, so
    that a worker that outlives its parent keeps nobody out. Raises CheckpointError, with the owner named, if another
    process keeps it for a second, and OSError if the file cannot be written. ``owner`` is what stands in the file.
    """

    def __init__(self, directory: Path) -> None:
        # A link would have us overwrite what it points to.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / LOCK_NAME, flags, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # the process's end releases it, when no thread writes any more
        try:
            _take(descriptor, directory)
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def close(self) -> None:
        """Give the right up. May be called again."""
        self._close()


def find_owner(directory: Path) -> str | None:
    """Return who writes to ``directory`` now, as a sentence; None if nobody does, or if that cannot be known."""
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    with os.fdopen(descriptor, errors="replace") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _describe_owner(file.read())
    return None


def _take(descriptor: int, directory: Path) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _try_take(descriptor):
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{directory} already has a writer",
                why=_describe_owner(os.read(descriptor, 4096).decode(errors="replace")),
                fix="end that run, or choose another directory",
            )
        time.sleep(0.01)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now})
    with open(descriptor, "w", closefd=False) as file:  # unlike os.write, it writes all or raises
        file.truncate()
        file.write(owner)


def _try_take(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        text = f"process {owner['pid']} on {owner['host']} has it since {owner['since']}"
        mine = (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
        return f"a manager of this very process is not closed: {text}" if mine else text
    except (ValueError, KeyError, TypeError):  # it is about to write its name, or the disk was full
        return "its owner has not written its name"


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
