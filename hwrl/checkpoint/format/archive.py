"""Checks of an archive of ``torch.save``, before ``torch.load`` unpacks it."""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any, BinaryIO


class _FileRange(io.RawIOBase):
    """``nbytes`` of an open file from byte ``start``, as a file. (torch's own view cannot seek from its end.)"""

    def __init__(self, file: BinaryIO, *, start: int, nbytes: int) -> None:
        super().__init__()
        self._file, self._start, self._nbytes, self._at = file, start, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        if self._at < 0:
            raise OSError("there is nothing before the beginning")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._nbytes - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def require_stored(file: BinaryIO, *, start: int = 0, nbytes: int) -> None:
    """Raise ValueError if the archive of ``nbytes`` at ``start`` would unpack to more than its own size.

    torch writes records uncompressed, but its reader unpacks compressed ones too: a megabyte can become gigabytes.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_FileRange(file, start=start, nbytes=nbytes))) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as exc:
        raise ValueError(f"torch.save did not write it: {exc}") from exc
    if min((record.header_offset for record in records), default=0) != 0 or archive.comment:
        # Readers of such a file disagree about the place of its directory.
        raise ValueError("it has an archive with something before or after it")
    unpacked = sum(record.file_size for record in records)
    if unpacked > nbytes or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(f"an archive of {nbytes:,} bytes in it would unpack to {unpacked:,}; hwrl compresses nothing")
