"""Open single files in directories that other people write to, or that came from elsewhere.

A name there may be a link to any file of the user, a pipe without a writer, or an endless device. Each function here
opens regular files only, never blocks, and raises OSError, with a sentence as its ``strerror``, for anything else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast


def local_path(text: str) -> Path:
    """Return the path ``text``; ``~`` at its beginning is the home directory. Raises ValueError for an unknown user."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"Input should be a path: {text!r} has no home directory; write ./~ for a file of this name")
    return Path(path)


def create_file(path: Path) -> BinaryIO:
    """Create ``path`` and open it for writing. What has this name is removed first and not opened: links, too."""
    for _ in range(2):
        with contextlib.suppress(FileExistsError):
            return cast(BinaryIO, open(path, "wb", opener=lambda name, flags: os.open(name, flags | os.O_EXCL, 0o666)))
        path.unlink(missing_ok=True)
    raise FileExistsError(errno.EEXIST, "another process creates it, too", str(path))


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file beside ``path`` to write to. After the block it replaces ``path``; after an error it is removed.

    The replacement is atomic but not durable: :class:`~hwrl.checkpoint.DurableFS` also syncs it.
    """
    draft = path.with_name(f".tmp_{path.name}")
    try:
        with create_file(draft) as file:
            yield file
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise


def open_to_append(path: Path) -> BinaryIO:
    """Open ``path`` for appending, without a buffer. It is created if it is missing; a link is refused."""
    return _open_regular(path, "ab")


def open_to_read(path: Path, *, max_nbytes: int | None = None, follow_links: bool = False) -> BinaryIO:
    """Open ``path`` for reading. A file with more than ``max_nbytes`` is refused, and a link unless ``follow_links``.

    A file that is still written may become longer later.
    """
    return _open_regular(path, "rb", max_nbytes=max_nbytes, follow_links=follow_links)


def read_file(path: Path, *, max_nbytes: int, follow_links: bool = False) -> bytes:
    """Return the content of ``path``, which must be as :func:`open_to_read` says."""
    with open_to_read(path, max_nbytes=max_nbytes, follow_links=follow_links) as file:
        return file.read(max_nbytes)


def _open_regular(path: Path, mode: str, *, max_nbytes: int | None = None, follow_links: bool = False) -> BinaryIO:
    safe = os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)  # opening a pipe would wait for its other end
    buffering = -1 if mode == "rb" else 0
    with contextlib.ExitStack() as stack:
        try:
            file = open(path, mode, buffering, opener=lambda name, own: os.open(name, own | safe))  # noqa: SIM115 - below
        except OSError as exc:
            why = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: "it is a pipe or a socket"}.get(exc.errno or 0)
            if why is None or (follow_links and exc.errno == errno.ELOOP):
                raise
            raise OSError(exc.errno, why, str(path)) from exc
        stack.enter_context(file)
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        if max_nbytes is not None and status.st_size > max_nbytes:
            raise OSError(errno.EFBIG, f"it has more than {max_nbytes:,} bytes", str(path))
        stack.pop_all()
        return cast(BinaryIO, file)
