"""The lock of a checkpoint directory. Only one manager can save there, and the lock ends with the owner's process.

The ranks of a node share the lock of their node leader. A rank may create a marker file without it.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
import weakref
from datetime import UTC, datetime
from pathlib import Path

from hwrl.errors import CheckpointError

LOCK_NAME = ".hwrl.lock"
PATIENCE_S = 1.0
"""How long to wait for the lock at least: :func:`find_owner` holds it for a moment."""
_log = logging.getLogger(__name__)


class DirectoryLock:
    """An exclusive lock on a directory.

    This process holds it from the creation of this object until :meth:`close`, until the object is garbage-collected,
    or until the process ends in any way. A forked child does not hold it, so an orphaned worker cannot block the next
    run.

    It is a kernel lock (``flock``) on a file in the directory. The content of the file names the owner, for error
    messages only. The file is never removed: two processes could then lock two different files with the same name.

    Raises CheckpointError with the owner's name if another process, or another object in this process, holds the lock
    for ``wait_s``. Raises OSError if the file cannot be written.
    """

    def __init__(self, directory: Path, *, wait_s: float = PATIENCE_S) -> None:
        # Without O_NOFOLLOW, the name of the owner would overwrite the target of a symbolic link.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(directory / LOCK_NAME, flags, 0o644)
        self._close = weakref.finalize(self, os.close, descriptor)
        # At exit, threads may still write. So the finalizer must not release the lock; the end of the process does.
        self._close.atexit = False
        try:
            _acquire(descriptor, directory, max(wait_s, PATIENCE_S))
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def close(self) -> None:
        """Release the lock. May be called again."""
        self._close()


def find_owner(directory: Path) -> str | None:
    """Return a description of the process that owns ``directory``; None if it has no owner or it cannot be read."""
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


def _acquire(descriptor: int, directory: Path, wait_s: float) -> None:
    began_s, is_logged = time.monotonic(), False
    while not _try_acquire(descriptor):
        waited_s = time.monotonic() - began_s
        if waited_s > wait_s:
            raise CheckpointError(
                f"{directory} already has a writer",
                why=_read_owner(descriptor),
                fix="end that run, or choose another directory",
            )
        if waited_s > PATIENCE_S and not is_logged:
            is_logged = True
            _log.warning("waiting up to %g s for the lock of %s: %s", wait_s, directory, _read_owner(descriptor))
        time.sleep(0.01 if waited_s < PATIENCE_S else 0.1)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    owner = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": now})
    with open(descriptor, "w", closefd=False) as file:  # unlike os.write, it writes every byte or raises
        file.truncate()
        file.write(owner)


def _try_acquire(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_owner(descriptor: int) -> str:
    return _describe_owner(os.pread(descriptor, 4096, 0).decode(errors="replace"))


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        text = f"process {owner['pid']} on {owner['host']} has held the lock since {owner['since']}"
        is_this_process = (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
        return f"this process has another open manager on it: {text}" if is_this_process else text
    except (ValueError, KeyError, TypeError):  # the owner has just taken the lock, or the disk was full
        return "its owner has not written its name into the lock file"


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
