"""Files that are only appended to: their content survives a killed process."""

from __future__ import annotations

import os
from pathlib import Path

from hwrl.files import open_to_append, open_to_read, require_owned


class AppendedFile:
    """A file opened for appending, without a buffer: when ``write`` returns, the operating system has all data.

    The methods raise OSError, also if the file was deleted or replaced. The operating system would accept writes to a
    deleted file, and the data would be lost.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = open_to_append(path)

    def write(self, data: bytes) -> None:
        """Append ``data``. After an error, a part of it may be in the file."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._check_path()

    def end_line(self) -> None:
        """Append a newline if the last line lacks it, for example after a power loss."""
        with open_to_read(self._path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            last = file.read(1)
        if last not in (b"", b"\n"):
            self.write(b"\n")

    def sync(self) -> None:
        """Make the content durable with fsync. To make the directory entry durable, sync the directory as well."""
        self._check_path()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def _check_path(self) -> None:
        require_owned(self._path)
        if not os.path.samestat(os.fstat(self._file.fileno()), self._path.stat()):
            raise FileNotFoundError(f"{self._path} was replaced by another file")
