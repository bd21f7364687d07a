"""The lock of a directory: one process may write there, and the lock ends with the process."""

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
_PATIENCE_S = 1.0  # :func:`find_owner` holds the lock for a moment


class DirectoryLock:
    """Held from creation until :meth:`close`, until nothing refers to it, or until this process ends in any way.

    It is a lock of the kernel on a file. The file's content only names the owner for error messages. The file is never
    removed, because two processes could then lock two files of that name. A forked child does not hold the lock: an
    orphaned worker blocks nobody.

    Raises CheckpointError, with the owner named, if another process holds the lock for a second, and OSError if the
    file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        # Without O_NOFOLLOW, a symbolic link would have us overwrite its target.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / LOCK_NAME, flags, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        self._close.atexit = False  # the end of the process releases it, after its last thread has written
        try:
            _acquire(descriptor, directory)
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def close(self) -> None:
        """Release the lock. May be called again."""
        self._close()


def find_owner(directory: Path) -> str | None:
    """Return a sentence about the writer of ``directory``. None if there is none, or if it cannot be known."""
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


def _acquire(descriptor: int, directory: Path) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _try_acquire(descriptor):
        if time.monotonic() > deadline_s:
            raise CheckpointError(
                f"{directory} already has a writer",
                why=_describe_owner(os.read(descriptor, 4096).decode(errors="replace")),
                fix="end that run, or choose another directory",
            )
        time.sleep(0.01)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now})
    with open(descriptor, "w", closefd=False) as file:  # writes all or raises, unlike os.write
        file.truncate()
        file.write(owner)


def _try_acquire(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        text = f"process {owner['pid']} on {owner['host']} has it since {owner['since']}"
        is_this_process = (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
        return f"a manager of this very process is not closed: {text}" if is_this_process else text
    except (ValueError, KeyError, TypeError):  # it is about to write its name, or the disk was full
        return "its owner has not written its name"


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
