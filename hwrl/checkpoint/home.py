"""The directory that holds the checkpoints: its lock, its tracker, its leftovers and what is kept."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
from pathlib import Path

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.manifest import CheckpointInfo, find_checkpoints, step_name
from hwrl.errors import CheckpointError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
LOCK_NAME = ".hwrl.lock"

_log = logging.getLogger(__name__)


class CheckpointHome:
    """The one writer of a directory of checkpoints, until :meth:`close`.

    Opening it takes a lock that dies with the process, and sweeps what a dead writer left behind.
    """

    def __init__(self, directory: Path, fs: DurableFS) -> None:
        self._directory, self._fs = directory, fs
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(directory)
        except OSError as exc:
            raise CheckpointError(
                f"cannot keep checkpoints in {directory}",
                why=f"{exc.strerror}: {exc.filename}",
                fix="choose a directory that this user may write to",
            ) from exc
        self._sweep()

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)

    def begin(self, step: int, save_id: str) -> Path:
        """Create and return the directory in which ``step`` is written until it is complete."""
        draft = self._directory / f".tmp_{step_name(step)}.{save_id}"
        self._fs.mkdir(draft)
        return draft

    def abandon(self, draft: Path) -> None:
        """Remove a directory from :meth:`begin`, as far as the disk lets us; the next start sweeps the rest."""
        try:
            self._fs.remove_tree(draft)
        except OSError as exc:
            _log.warning("could not remove %s: %s", draft, exc)

    def commit(self, draft: Path, step: int) -> Path:
        """Give ``draft`` its name; when this returns, the checkpoint survives a crash of the machine.

        An incomplete directory of that name is put aside first.
        """
        final = self._directory / step_name(step)
        if final.is_symlink() or final.exists():
            self._discard(final)
        self._fs.rename(draft, final)
        self._fs.sync_directory(self._directory)
        return final

    def set_tracker(self, step: int) -> None:
        """Make the tracker file name ``step``, in one step."""
        self._fs.replace_file(self._directory / TRACKER_NAME, str(step).encode())

    def retain(self, keep: int | None) -> None:
        """Remove all complete checkpoints but the newest ``keep``; None keeps all. What is not complete stays."""
        if keep is None:
            return
        complete, _ = find_checkpoints(self._directory)
        for info in complete[: max(0, len(complete) - keep)]:
            self._discard(info.path)

    def put_aside(self, path: Path) -> None:
        """Rename a checkpoint that was found broken, so that it is none any more; nothing of it is deleted."""
        if path.exists():
            self._fs.rename(path, path.with_name(f".broken_{path.name}.{os.urandom(4).hex()}"))
            self._fs.sync_directory(self._directory)

    def complete(self) -> list[CheckpointInfo]:
        """Return the complete checkpoints, oldest first."""
        return find_checkpoints(self._directory)[0]

    def _discard(self, path: Path) -> None:
        # Renamed before it is emptied: a crash in between leaves no half checkpoint under a checkpoint's name.
        trash = path.with_name(f".trash_{path.name}.{os.urandom(4).hex()}")
        self._fs.rename(path, trash)
        self._fs.sync_directory(self._directory)
        self._remove(trash)

    def _sweep(self) -> None:
        for path in self._directory.iterdir():
            if path.name.startswith((".tmp_", ".trash_")):
                _log.info("removing %s, left by a save that did not end", path)
                self._remove(path)

    def _remove(self, path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            self._fs.remove_tree(path)
        else:
            path.unlink()


def _lock(directory: Path) -> int:
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        owner = os.read(descriptor, 4096).decode(errors="replace")
        os.close(descriptor)
        raise CheckpointError(
            f"{directory} already has a writer",
            why=f"its owner is {owner or 'unknown'}",
            fix="end that run, or choose another directory",
        ) from exc
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
    return descriptor
