"""The lock of a checkpoint directory. Only one manager can save there, and the lock ends with the owner's process.

The ranks of a node share the lock of their node leader. A rank may create a marker file without it.
"""

from __future__ import annotations

import contextlib
import errno
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
from hwrl.files import OwnedDirectory, open_regular, read_file

LOCK_NAME = ".hwrl.lock"
PATIENCE_S = 1.0
"""How long to wait for the lock at least: :func:`find_owner` holds it for a moment."""
_UNLOCKED_VARIABLE = "HWRL_UNLOCKED"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # NFS without a lock server; Lustre with noflock; FUSE
_MAX_NBYTES = 4096
_log = logging.getLogger(__name__)


class DirectoryLock:
    """An exclusive lock on a directory.

    This process holds it from the creation of this object until :meth:`close`, until the object is garbage-collected,
    or until the process ends in any way. A forked child does not hold it, so an orphaned worker cannot block the next
    run.

    It is a kernel lock (``flock``) on a file in the directory. The content of the file names the owner. The file is
    never removed: two processes could then lock two different files with the same name. Other users cannot open it, so
    they cannot hold the lock.

    A lock on a file does not own the path to it. Until :meth:`close`, every change below ``directory`` by this process
    is refused if the path leads elsewhere (:class:`hwrl.files.OwnedDirectory`).

    Raises CheckpointError with the owner's name if another process, or another object in this process, holds the lock
    for ``wait_s``, and if the file system has no locks, unless ``HWRL_UNLOCKED=1``. With it, the newest process owns
    the directory there. Raises OSError if the file cannot be written.
    """

    def __init__(self, directory: Path, *, wait_s: float = PATIENCE_S) -> None:
        descriptor = open_regular(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
        cleanup = contextlib.ExitStack()
        cleanup.callback(os.close, descriptor)
        self._close = weakref.finalize(self, cleanup.close)
        # At exit, threads may still write. So the finalizer must not release the lock; the end of the process does.
        self._close.atexit = False
        try:
            if (status := os.fstat(descriptor)).st_mode & 0o077 and status.st_uid == os.geteuid():
                os.fchmod(descriptor, 0o600)  # the file is of an earlier hwrl
            is_locked = _acquire(descriptor, directory, max(wait_s, PATIENCE_S))
            content = _write_owner(descriptor)
            self._owned = OwnedDirectory(directory, LOCK_NAME, descriptor, lock_content=None if is_locked else content)
            cleanup.callback(self._owned.end)
            self.require()  # it may have been replaced before the lock was taken
        except BaseException:
            self.close()
            raise
        _held.add(self)

    def require(self) -> None:
        """Raise OSError, with what happened, if the path leads elsewhere now, or another process has the lock."""
        self._owned.require()

    def close(self) -> None:
        """Release the lock. May be called again."""
        self._close()


def find_owner(directory: Path) -> str | None:
    """Return a description of the process that owns ``directory``; None if it has no owner or it cannot be read."""
    try:
        descriptor = open_regular(directory / LOCK_NAME, os.O_RDONLY, max_nbytes=_MAX_NBYTES)
    except OSError:
        return None
    try:
        return _read_owner(descriptor) if try_flock(descriptor, fcntl.LOCK_SH) is False else None
    finally:
        os.close(descriptor)


def read_lock(directory: Path) -> bytes | None:
    """Return the content of the lock file, for :func:`share_lock`; None if there is no file."""
    try:
        return read_file(directory / LOCK_NAME, max_nbytes=_MAX_NBYTES)
    except FileNotFoundError:
        return None


def share_lock(directory: Path, content: bytes) -> None:
    """Refuse changes below ``directory`` in this process, too, when its owner's lock file is no longer there.

    ``content`` is that of the owner's lock file. Does nothing on another host that has a disk of its own under this
    path. Raises CheckpointError if the directory has another owner, and OSError if the file cannot be read.
    """
    is_here = json.loads(content)["host"] == socket.gethostname()
    if (found := read_lock(directory)) != content:
        if is_here or find_owner(directory) is not None:
            raise CheckpointError(
                f"{directory} is no longer the directory of this run",
                why="it was deleted, or its lock file was"
                if found is None
                else _describe_owner(found.decode(errors="replace")),
                fix="let this run end; if its directory was renamed, rename it back and continue it with resume=true",
            )
        return
    OwnedDirectory(directory, LOCK_NAME, open_regular(directory / LOCK_NAME, os.O_RDONLY), lock_content=content)


def try_flock(descriptor: int, operation: int) -> bool | None:
    """Return whether the lock was taken. None: this file system has no locks."""
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as exc:
        if exc.errno in _UNSUPPORTED:
            return None
        raise
    return True


def _acquire(descriptor: int, directory: Path, wait_s: float) -> bool:
    """Wait for the lock. Return False if there are no locks, and the user goes without."""
    began_s, is_logged = time.monotonic(), False
    while not (is_locked := try_flock(descriptor, fcntl.LOCK_EX)):
        if is_locked is None:
            _accept_no_locks(directory)
            return False
        waited_s = time.monotonic() - began_s
        if waited_s > wait_s:
            raise CheckpointError(
                f"{directory} already has a writer",
                why=_read_owner(descriptor),
                fix="end that run, or choose another directory; managers of several ranks need a group=",
            )
        if waited_s > PATIENCE_S and not is_logged:
            is_logged = True
            _log.warning("waiting up to %g s for the lock of %s: %s", wait_s, directory, _read_owner(descriptor))
        time.sleep(0.01 if waited_s < PATIENCE_S else 0.1)
    return True


def _accept_no_locks(directory: Path) -> None:
    if os.environ.get(_UNLOCKED_VARIABLE) != "1":
        raise CheckpointError(
            f"{directory} cannot be locked",
            why="its file system has no file locks (flock), so hwrl cannot keep a second writer out",
            fix="mount it with them (Lustre: -o flock; NFS: a lock server), choose another directory, or set "
            f"{_UNLOCKED_VARIABLE}=1 and never start a second writer there: it would take the directory over",
        )
    _log.warning("%s is used without a lock: %s=1", directory, _UNLOCKED_VARIABLE)


def _write_owner(descriptor: int) -> bytes:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": now, "id": os.urandom(8).hex()}
    content = json.dumps(owner).encode()
    with open(descriptor, "wb", closefd=False) as file:  # unlike os.write, it writes every byte or raises
        file.truncate()
        file.write(content)
    os.fsync(descriptor)  # other hosts read it, too
    return content


def _read_owner(descriptor: int) -> str:
    return _describe_owner(os.pread(descriptor, _MAX_NBYTES, 0).decode(errors="replace"))


def _describe_owner(text: str) -> str:
    try:
        owner = json.loads(text)
        text = f"process {owner['pid']} on {owner['host']} has held the lock since {owner['since']}"
        is_this_process = (owner["pid"], owner["host"]) == (os.getpid(), socket.gethostname())
        return f"this process has another open manager on it: {text}" if is_this_process else text
    except (ValueError, KeyError, TypeError, RecursionError):  # the owner has just taken the lock, or the disk was full
        return "its owner has not written its name into the lock file"


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _close_in_child() -> None:
    for lock in list(_held):
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)
