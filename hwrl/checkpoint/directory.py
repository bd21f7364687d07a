"""The directory with a run's checkpoints, and every operation of its single writer."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.lock import PATIENCE_S, DirectoryLock, try_flock
from hwrl.checkpoint.manifest import MANIFEST_NAME, find_checkpoints, step_name
from hwrl.errors import CheckpointError
from hwrl.files import LOST, read_file

TRACKER_NAME = "latest_checkpointed_iteration.txt"
"""The tracker file. It holds the newest complete step as a plain integer.

Other programs read it to find the step to resume from. hwrl reads it only to know that this step was once complete on
all nodes. If no step is complete, the tracker keeps its old step, whose directory may be gone.
"""
_MAX_TRACKER_NBYTES = 64
DRAFT_PREFIX, TRASH_PREFIX, BROKEN_PREFIX = ".tmp_", ".trash_", ".broken_"
_UNFINISHED = re.compile(  # matches only hwrl's own names: in a wrong directory, hwrl removes nothing of the user's
    r"\.tmp_global_step_\d+\.[0-9a-f]{16}|\.tmp_mark_[0-9a-f]{16}|\.trash_global_step_\d+\.[0-9a-f]{8}"
    rf"|\.tmp_{re.escape(TRACKER_NAME)}"
)

_log = logging.getLogger(__name__)


class CheckpointDirectory:
    """The single writer of a directory with checkpoints, until :meth:`close`.

    Opening it takes ``lock``, and removes what a dead writer left unfinished. The lock ends with the process. If
    another process has it, opening waits up to ``lock_wait_s``. ``fs`` changes nothing here if the directory was lost
    to another process; a commit also proves that it was not lost to another object in this process.

    If each node has its own disk, each node has its own directory. It holds this node's part of each checkpoint, and a
    checkpoint is complete when every node holds its part. This class knows one node's directory only.
    """

    def __init__(self, path: Path, fs: DurableFS, *, lock_wait_s: float = PATIENCE_S) -> None:
        self.path, self._fs = path, fs
        with os_errors_as_checkpoint_errors(path):
            fs.mkdir(path, mode=0o700)
            self.lock = DirectoryLock(path, wait_s=lock_wait_s)
        try:
            with os_errors_as_checkpoint_errors(path):
                _read_tracker(path)  # if a directory has the tracker's name, fail now and not after a save
                self._remove_leftovers()
        except CheckpointError:
            self.close()
            raise

    def close(self) -> None:
        """Release the lock."""
        self.lock.close()

    def create_draft(self, step: int, save_id: str) -> Path:
        """Create the draft of ``step`` and return its path. Drafts of earlier saves are removed first."""
        self._remove_leftovers()
        draft = draft_path(self.path, step, save_id)
        self._fs.mkdir(draft)
        return draft

    def remove_draft(self, draft: Path) -> None:
        """Remove a draft. An error of the disk is only logged: the next save removes the rest."""
        try:
            self._fs.remove_tree(draft)
        except OSError as exc:
            _log.warning("could not remove %s: %s", draft, exc)

    def commit(self, draft: Path, step: int) -> None:
        """Rename ``draft`` to its final name, ``global_step_<step>``.

        When this returns, this node's part of the checkpoint survives a crash of the machine. If a directory already
        has the final name, it is put aside first, and none of its files are deleted.
        """
        self.lock.require()
        final = self.path / step_name(step)
        self.put_aside([final])
        self._fs.rename(draft, final)
        self._fs.sync_directory(self.path)

    @property
    def announced_step(self) -> int:
        """The step in the tracker, or -1 if the tracker holds no step."""
        try:
            return int(_read_tracker(self.path))
        except ValueError:
            return -1

    def set_tracker(self, step: int) -> None:
        """Write ``step`` into the tracker file atomically."""
        if _read_tracker(self.path) != (text := str(step).encode()):
            self._fs.replace_file(self.path / TRACKER_NAME, text)

    def retain(self, keep: int | None) -> None:
        """Remove all but the newest ``keep`` checkpoints; None keeps all.

        Only checkpoints that are intact on this disk are counted and removed. If a process reads one of them
        (:func:`~hwrl.checkpoint.hold_for_reading`), it stays until a later save. A node's part that is newer than the
        tracker is neither counted nor removed, because other nodes may lack their parts.
        """
        if keep is None:
            return
        intact = find_checkpoints(self.path)[0]
        counted = [info for info in intact if info.manifest.nodes == 1 or info.step <= self.announced_step]
        for info in counted[:-keep]:
            self._remove_checkpoint(info.path)

    def put_aside(self, paths: Collection[Path]) -> None:
        """Rename checkpoints, so that their steps can be saved again. None of their files are deleted."""
        for path in paths:
            if os.path.lexists(path):
                self._fs.rename(path, path.with_name(f"{BROKEN_PREFIX}{path.name}.{os.urandom(4).hex()}"))
                self._fs.sync_directory(self.path)

    def _remove_checkpoint(self, path: Path) -> None:
        """Remove a checkpoint, unless a process is reading it."""
        # It is renamed first: a crash during the removal must not leave half of it under a checkpoint's name.
        trash = path.with_name(f"{TRASH_PREFIX}{path.name}.{os.urandom(4).hex()}")
        with (path / MANIFEST_NAME).open("r+b") as manifest:  # NFS refuses LOCK_EX on a file opened for reading
            if try_flock(manifest.fileno(), fcntl.LOCK_EX) is False:  # None: without locks, nobody can hold it
                _log.info("keeping %s until a later save, because a process is reading it", path)
                return
            self._fs.rename(path, trash)
        self._fs.sync_directory(self.path)
        self._fs.remove_tree(trash)

    def _remove_leftovers(self) -> None:
        """Remove the drafts of interrupted saves, and checkpoints whose removal was interrupted."""
        for path in unfinished_saves(self.path):
            _log.info("removing %s, left by an interrupted save, removal or start", path)
            self._fs.remove_tree(path)


def unfinished_saves(directory: Path) -> list[Path]:
    """Return the temporary files and directories in ``directory``, of running and of interrupted processes.

    They are drafts of saves and of the tracker, marker files of opening managers, and checkpoints that are being
    removed.
    """
    return sorted(path for path in directory.iterdir() if _UNFINISHED.fullmatch(path.name))


def broken_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in ``directory`` that were put aside because they could not be resumed."""
    return sorted(path for path in directory.iterdir() if path.name.startswith(BROKEN_PREFIX))


def draft_path(directory: Path, step: int, save_id: str) -> Path:
    """Return the path of a draft. A draft is the directory of a save before its commit."""
    return directory / f"{DRAFT_PREFIX}{step_name(step)}.{save_id}"


@contextlib.contextmanager
def os_errors_as_checkpoint_errors(directory: Path) -> Iterator[None]:
    """Translate an OSError in the block into a CheckpointError about ``directory``."""
    try:
        yield
    except OSError as exc:
        fix = "choose a directory that this user may write to, on a disk with room"
        if exc.errno == LOST:
            fix = "end this process: it saves nothing there any more"
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}", why=f"{exc.strerror}: {exc.filename}", fix=fix
        ) from exc


def _read_tracker(directory: Path) -> bytes:
    """Return the tracker's content; nothing if there is no regular file of a tracker's length: a save replaces it.

    Raises CheckpointError if a directory has the tracker's name: no file can replace it.
    """
    path = directory / TRACKER_NAME
    if path.is_dir() and not path.is_symlink():
        raise CheckpointError(
            f"cannot keep checkpoints in {directory}",
            why=f"{TRACKER_NAME} is a directory",
            fix="remove it; hwrl writes the newest step into a file with this name",
        )
    try:
        return read_file(path, max_nbytes=_MAX_TRACKER_NBYTES)
    except OSError as exc:
        if exc.errno in (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.EINVAL, errno.EFBIG):
            return b""
        raise
