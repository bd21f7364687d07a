"""A file system with durable writes: :class:`DurableFS`. A save changes the disk through it, except for its export."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from hwrl.files import create_file, require_owned


@dataclass(frozen=True)
class FileRecord:
    """The size in bytes and the SHA-256 (hexadecimal) of one file."""

    nbytes: int
    sha256: str


class DurableFS:
    """Creates, syncs, renames and removes files and directories.

    Before a stream closes, it is flushed **and then** synced. (torch syncs its metadata file while the bytes are still
    in Python's buffer.) The hash is computed from the bytes in memory, not from a second read of the disk;
    :meth:`adopt_file` must read the disk.

    A file has two durable things: its content and its name. After a write only the content is durable. The name is
    durable after :meth:`sync_directory` of the parent.

    No method changes anything below a directory that this process owned and lost: see :mod:`hwrl.files`. Every method
    first calls :meth:`before` for each change of the disk, and once for the removal of a tree. A test can
    override it to simulate a full disk or the death of the process.
    """

    def before(self, operation: str, path: Path) -> None:
        """Do nothing. A subclass may override this: it runs before each change that this object makes.

        ``operation`` is one of ``mkdir``, ``create``, ``write``, ``sync``, ``rename``, ``sync_directory``, ``remove``.
        """

    def __init__(self) -> None:
        self._written: dict[Path, FileRecord] = {}

    def take_records(self, directory: Path) -> dict[str, FileRecord]:
        """Return the records of the files written in ``directory``, by relative name. A second call returns none."""
        inside = [path for path in self._written if path.is_relative_to(directory)]
        return {str(path.relative_to(directory)): self._written.pop(path) for path in inside}

    @contextlib.contextmanager
    def create_stream(self, path: Path) -> Iterator[Any]:
        """Open the new file ``path`` for writing. When the block ends without an error, the content is durable."""
        self.before("create", path)
        with create_file(path) as file:
            hashed = _HashedStream(file, self, path)
            yield hashed
            file.flush()
            self._sync(file.fileno(), path)
        self._written[path] = hashed.record()

    def write_file(self, path: Path, data: bytes) -> None:
        """Write a file. When this returns, its content is durable. Its name is not."""
        with self.create_stream(path) as stream:
            stream.write(data)

    def replace_file(self, path: Path, data: bytes) -> None:
        """Replace ``path`` atomically. A reader finds the old content or the new one, even after a crash."""
        draft = path.with_name(f".tmp_{path.name}")
        self.write_file(draft, data)
        self.rename(draft, path)
        self.sync_directory(path.parent)
        self._written.pop(path, None)

    def adopt_file(self, path: Path) -> None:
        """Sync and hash a file that was not written through this object."""
        with path.open("rb") as file:
            self._sync(file.fileno(), path)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._written[path] = FileRecord(path.stat().st_size, digest)

    def mkdir(self, path: Path, *, mode: int = 0o777) -> None:
        """Create a directory with ``mode``, and its missing parents. The names that it created are durable then.

        A directory that already exists is not synced.
        """
        if path.is_dir():
            return
        self.mkdir(path.parent)
        self._begin("mkdir", path)
        path.mkdir(mode=mode, exist_ok=True)
        self.sync_directory(path.parent)

    def rename(self, path: Path, new_path: Path) -> None:
        """Rename a file or directory. The new name is durable only after :meth:`sync_directory` of the parent."""
        self._begin("rename", path)
        path.rename(new_path)
        if path in self._written:
            self._written[new_path] = self._written.pop(path)

    def sync_directory(self, path: Path) -> None:
        """Make the names of the files in the directory ``path`` durable."""
        self.before("sync_directory", path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def remove_tree(self, path: Path) -> None:
        """Remove a directory with its content, or a single file. The target of a symbolic link is not removed."""
        self.take_records(path)
        self._begin("remove", path)
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def _begin(self, operation: str, path: Path) -> None:
        self.before(operation, path)
        require_owned(path)

    def _sync(self, descriptor: int, path: Path) -> None:
        self.before("sync", path)
        os.fsync(descriptor)


class _HashedStream:
    """An append-only binary stream. It hashes every byte."""

    def __init__(self, file: BinaryIO, fs: DurableFS, path: Path) -> None:
        self._file, self._fs, self._path = file, fs, path
        self._hash = hashlib.sha256()
        self._nbytes = 0

    def write(self, data: Any) -> int:
        self._fs.before("write", self._path)
        self._file.write(data)
        self._hash.update(data)
        self._nbytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self._nbytes

    def flush(self) -> None:
        """Do nothing. :meth:`DurableFS.create_stream` flushes the file once, before the sync."""

    def record(self) -> FileRecord:
        return FileRecord(self._nbytes, self._hash.hexdigest())
