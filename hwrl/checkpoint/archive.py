"""A check of an archive from ``torch.save``, before ``torch.load`` unpacks it: :func:`require_stored`."""

from __future__ import annotations

import io
import os
import zipfile
from typing import Any, BinaryIO


class _FileRange(io.RawIOBase):
    """A range of an open file, as a file: ``nbytes`` bytes from byte ``start``.

    torch has such a class, but it cannot seek relative to the end of the range.
    """

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
            raise OSError("cannot seek before the beginning of the file")
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._start + self._at)
        data = self._file.read(min(len(buffer), max(0, self._nbytes - self._at)))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def require_stored(file: BinaryIO, *, start: int = 0, nbytes: int) -> None:
    """Raise ValueError unless ``file`` has an uncompressed archive of ``nbytes`` bytes at byte ``start``.

    torch writes uncompressed records only, but its reader also accepts compressed ones. A forged megabyte could then
    unpack to gigabytes.
    """
    try:
        with zipfile.ZipFile(io.BufferedReader(_FileRange(file, start=start, nbytes=nbytes))) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as exc:
        raise ValueError(f"it has an archive that torch.save did not write: {exc}") from exc
    if min((record.header_offset for record in records), default=0) != 0 or archive.comment:
        # Different readers look for the archive's table of contents in different places of such a file.
        raise ValueError("it has an archive with extra bytes before or after its content")
    unpacked = sum(record.file_size for record in records)
    if unpacked > nbytes or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(
            f"an archive of {nbytes:,} bytes in it would unpack to {unpacked:,} bytes; hwrl does not compress"
        )
