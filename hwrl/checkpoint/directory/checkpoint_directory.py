"""The directory of a run's checkpoints, and all operations of its one writer."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.directory.lock import DirectoryLock
from hwrl.checkpoint.format.manifest import CheckpointInfo, find_checkpoints, hold_for_removal, step_name, step_of
from hwrl.errors import CheckpointError

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""The tracker file: the newest complete step, as a plain integer.

Other programs read it, to find the step to resume from. hwrl reads it only to tell which steps all nodes once held.
"""
DRAFT_PREFIX, TRASH_PREFIX, BROKEN_PREFIX = ".tmp_", ".trash_", ".broken_"
_UNFINISHED = re.compile(  # only names from hwrl: nothing is lost if a user opens the wrong directory
    r"\.tmp_global_step_\d+\.[0-9a-f]{16}|\.tmp_mark_[0-9a-f]{16}|\.trash_global_step_\d+\.[0-9a-f]{8}"
    rf"|\.tmp_{re.escape(TRACKER_NAME)}"
)

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The one writer of a directory of checkpoints, until :meth:`close`.

    Opening it takes a lock that ends with the process, and removes the drafts of a dead writer. Where nodes have disks
    of their own, each node has a directory, and a checkpoint is complete when all of them hold it.
    """

    def __init__(self, path: Path, fs: DurableFS) -> None:
        self.path, self._fs = path, fs
        with os_errors_as_checkpoint_errors(path):
            fs.mkdir(path)
            self._lock = DirectoryLock(path)
        try:
            with os_errors_as_checkpoint_errors(path):
                _read_tracker(path)  # refuse a directory in the tracker's place now, not after a save
                self._sweep()
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self._lock.close()

    def begin(self, step: int, save_id: str) -> Path:
        """Create and return the draft: the directory of ``step`` until it is complete."""
        self._sweep()
        draft = draft_path(self.path, step, save_id)
        self._fs.mkdir(draft)
        return draft

    def abandon(self, draft: Path) -> None:
        """Remove a draft, as far as the disk allows. The next save removes the rest."""
        try:
            self._fs.remove_tree(draft)
        except OSError as exc:
            _log.warning("could not remove %s: %s", draft, exc)

    def commit(self, draft: Path, step: int) -> None:
        """Rename ``draft`` to its final name. When this returns, the checkpoint survives a crash of the machine.

        A directory of this name is put aside first; nothing of it is deleted.
        """
        final = self.path / step_name(step)
        self.put_aside([final])
        self._fs.rename(draft, final)
        self._fs.sync_directory(self.path)

    @property
    def announced(self) -> int:
        """The step in the tracker, -1 if there is none."""
        try:
            return int(_read_tracker(self.path))
        except ValueError:
            return -1

    def set_tracker(self, step: int) -> None:
        """Atomically write ``step`` into the tracker file."""
        if _read_tracker(self.path) != (text := str(step).encode()):
            self._fs.replace_file(self.path / TRACKER_NAME, text)

    def retain(self, keep: int | None) -> None:
        """Remove intact checkpoints beyond the newest ``keep``; None keeps all. Incomplete ones stay.

        A checkpoint held by a reader (:func:`~hwrl.checkpoint.hold_for_reading`) stays until the next save. The part of
        one node is not counted while it is newer than the tracker: other nodes may lack theirs.
        """
        if keep is None:
            return
        counted = [info for info in self.intact() if info.manifest.nodes == 1 or info.step <= self.announced]
        for info in counted[:-keep]:
            self._discard(info.path)

    def put_aside(self, paths: Collection[Path]) -> None:
        """Rename bad checkpoints: their steps can be saved again, and nothing of them is deleted."""
        for path in paths:
            if os.path.lexists(path):
                self._fs.rename(path, path.with_name(f"{BROKEN_PREFIX}{path.name}.{os.urandom(4).hex()}"))
                self._fs.sync_directory(self.path)

    def intact(self) -> list[CheckpointInfo]:
        """Return the checkpoints intact on this disk, oldest first. Other nodes may lack their parts."""
        return find_checkpoints(self.path)[0]

    def _discard(self, path: Path) -> None:
        """Remove a checkpoint, unless a process reads it."""
        # Renamed first: a crash while it is emptied leaves no half checkpoint under a checkpoint's name.
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{os.urandom(4).hex()}")
        with hold_for_removal(path) as is_free:
            if not is_free:
                _log.info("keeping %s for now: a process reads it", path)
                return
            self._fs.rename(path, trash)
        self._fs.sync_directory(self.path)
        self._fs.remove_tree(trash)

    def _sweep(self) -> None:
        """Remove the drafts of interrupted saves, and partly removed checkpoints."""
        for path in unfinished_saves(self.path):
            _log.info("removing %s, left by an interrupted save", path)
            self._fs.remove_tree(path)


def has_saves(directory: Path) -> bool:
    """Return whether hwrl has saved in ``directory``, or has begun to. A lock alone is no save."""
    return directory.is_dir() and any(
        step_of(path.name) is not None or path.name.startswith(BROKEN_PREFIX) or _UNFINISHED.fullmatch(path.name)
        for path in directory.iterdir()
    )


def unfinished_saves(directory: Path) -> list[Path]:
    """Return the entries of ``directory`` from a running or interrupted save."""
    return sorted(path for path in directory.iterdir() if _UNFINISHED.fullmatch(path.name))


def broken_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints put aside in ``directory``: they could not be resumed."""
    return sorted(path for path in directory.iterdir() if path.name.startswith(BROKEN_PREFIX))


def draft_path(directory: Path, step: int, save_id: str) -> Path:
    """Return the path of a draft."""
    return directory / f"{DRAFT_PREFIX}{step_name(step)}.{save_id}"


@contextlib.contextmanager
def os_errors_as_checkpoint_errors(directory: Path) -> Iterator[None]:
    """Raise CheckpointError for an OSError in the block. The block opens ``directory``."""
    try:
        yield
    except OSError as exc:
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}",
            why=f"{exc.strerror}: {exc.filename}",
            fix="choose a directory that this user may write to, on a disk with room",
        ) from exc


def _read_tracker(directory: Path) -> bytes:
    """Return the tracker's content, empty if it is no regular file. CheckpointError if it cannot be replaced."""
    path = directory / TRACKER_NAME
    if path.is_symlink():
        return b""
    if path.is_dir():
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}",
            why=f"{TRACKER_NAME} is a directory",
            fix="remove it; the file of that name holds the newest step",
        )
    return path.read_bytes() if path.is_file() else b""
