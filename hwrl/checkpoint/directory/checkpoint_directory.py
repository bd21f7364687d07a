"""The directory that holds the checkpoints: its lock, its tracker, its leftovers and what is kept."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.directory.lock import DirectoryLock
from hwrl.checkpoint.format.manifest import CheckpointInfo, find_checkpoints, is_in_use, step_name, step_of
from hwrl.errors import CheckpointError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
DRAFT_PREFIX, TRASH_PREFIX, BROKEN_PREFIX = ".tmp_", ".trash_", ".broken_"
_LEFTOVER = re.compile(  # of what hwrl makes, and nothing else: who opens a wrong directory loses nothing
    r"\.tmp_global_step_\d+\.[0-9a-f]{16}|\.tmp_mark_[0-9a-f]{16}|\.trash_global_step_\d+\.[0-9a-f]{8}"
    rf"|\.tmp_{re.escape(TRACKER_NAME)}"
)

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The one writer of a directory of checkpoints, until :meth:`close`.

    Opening it takes a lock that dies with the process, and sweeps what a dead writer left behind. Where nodes have
    disks of their own, each has a home, and a checkpoint is complete when all of them have it.
    """

    def __init__(self, directory: Path, fs: DurableFS) -> None:
        self.directory, self._fs = directory, fs
        with usable(directory):
            fs.mkdir(directory)
            self._lock = DirectoryLock(directory)
        try:
            with usable(directory):
                _read_tracker(directory)  # what cannot be replaced is refused now, and not after a save
                self._sweep()
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def begin(self, step: int, save_id: str) -> Path:
        """Create and return the directory in which ``step`` is written until it is complete."""
        self._sweep()
        draft = draft_path(self.directory, step, save_id)
        self._fs.mkdir(draft)
        return draft

    def abandon(self, draft: Path) -> None:
        """Remove a directory from :meth:`begin`, as far as the disk lets us; the next save sweeps the rest."""
        try:
            self._fs.remove_tree(draft)
        except OSError as exc:
            _log.warning("could not remove %s: %s", draft, exc)

    def commit(self, draft: Path, step: int) -> None:
        """Give ``draft`` its name; when this returns, the checkpoint survives a crash of the machine.

        What has that name already is put aside first; nothing of it is deleted.
        """
        final = self.directory / step_name(step)
        self.put_aside([final])
        self._fs.rename(draft, final)
        self._fs.sync_directory(self.directory)

    @property
    def announced(self) -> int:
        """The step that the tracker names, -1 if it names none."""
        try:
            return int(_read_tracker(self.directory))
        except ValueError:
            return -1

    def set_tracker(self, step: int) -> None:
        """Make the tracker name ``step``, in one step."""
        if _read_tracker(self.directory) != (text := str(step).encode()):
            self._fs.replace_file(self.directory / TRACKER_NAME, text)

    def retain(self, keep: int | None) -> None:
        """Remove all complete checkpoints but the newest ``keep``; None keeps all. What is not complete stays.

        One that somebody reads (:func:`~hwrl.checkpoint.format.manifest.in_use`) stays as well, until the next save.
        A part that is newer than what is announced does not count as one of the newest: other nodes may lack theirs.
        """
        if keep is None:
            return
        counted = [info for info in self.complete() if info.manifest.nodes == 1 or info.step <= self.announced]
        for info in counted[:-keep]:
            if is_in_use(info.path):
                _log.info("keeping %s for now: somebody reads it", info.path)
            else:
                self._discard(info.path)

    def put_aside(self, paths: Collection[Path]) -> None:
        """Rename checkpoints that are not to be resumed, so that they are none any more; nothing of them is deleted."""
        for path in paths:
            if os.path.lexists(path):
                self._fs.rename(path, path.with_name(f"{BROKEN_PREFIX}{path.name}.{os.urandom(4).hex()}"))
                self._fs.sync_directory(self.directory)

    def complete(self) -> list[CheckpointInfo]:
        """Return the complete checkpoints, oldest first."""
        return find_checkpoints(self.directory)[0]

    def _discard(self, path: Path) -> None:
        # Renamed before it is emptied: a crash in between leaves no half checkpoint under a checkpoint's name.
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{os.urandom(4).hex()}")
        self._fs.rename(path, trash)
        self._fs.sync_directory(self.directory)
        self._fs.remove_tree(trash)

    def _sweep(self) -> None:
        """Remove what a save left that did not end, and the rest of what was not removed whole."""
        for path in leftovers(self.directory):
            _log.info("removing %s, left by a save that did not end", path)
            self._fs.remove_tree(path)


def is_home(directory: Path) -> bool:
    """Return whether ``directory`` exists and hwrl has saved there, or has begun to; a lock alone is no save."""
    return directory.is_dir() and any(
        step_of(path.name) is not None or path.name.startswith(BROKEN_PREFIX) or _LEFTOVER.fullmatch(path.name)
        for path in directory.iterdir()
    )


def leftovers(directory: Path) -> list[Path]:
    """Return what lies in ``directory`` because a save has not ended, or has not ended well."""
    return sorted(path for path in directory.iterdir() if _LEFTOVER.fullmatch(path.name))


def set_aside(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory`` that could not be resumed and have made room for others."""
    return sorted(path for path in directory.iterdir() if path.name.startswith(BROKEN_PREFIX))


def draft_path(directory: Path, step: int, save_id: str) -> Path:
    """Return the directory in which ``step`` is written."""
    return directory / f"{DRAFT_PREFIX}{step_name(step)}.{save_id}"


@contextlib.contextmanager
def usable(directory: Path) -> Iterator[None]:
    """Raise CheckpointError for what the disk raises while checkpoints in ``directory`` are opened."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}",
            why=f"{exc.strerror}: {exc.filename}",
            fix="choose a directory that this user may write to, on a disk with room",
        ) from exc


def _read_tracker(directory: Path) -> bytes:
    """Return what the tracker says, nothing if it is no regular file; CheckpointError if it cannot be replaced."""
    path = directory / TRACKER_NAME
    if path.is_symlink():
        return b""
    if path.is_dir():
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}",
            why=f"{TRACKER_NAME} is a directory",
            fix="remove it; a file of that name says which step is the newest",
        )
    return path.read_bytes() if path.is_file() else b""
