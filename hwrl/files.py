"""Open and create single files in directories of other people, or from elsewhere.

A name there may be a link to any file of the user, a pipe without a writer, or an endless device. Each function here
opens regular files only, never blocks, and raises OSError, with a sentence as its ``strerror``, for anything else.

A path is no proof of ownership: while a process waits, its directory may be deleted, renamed, or replaced by another
run's. Where this process has an :class:`OwnedDirectory`, each function for a change first proves the path; other code
calls :func:`require_owned`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast

LOST = errno.ESTALE
"""The ``errno`` of the error for an owned directory whose path leads elsewhere now."""


class OwnedDirectory:
    """A directory of this process, until :meth:`end`. A newer object for the same path takes its place.

    It is still owned if ``path`` leads to the same directory as at first, and the file ``lock_name`` there is the file
    of the descriptor ``lock``, which stays open. With ``lock_content``, the file must also have this content.
    """

    def __init__(self, path: Path, lock_name: str, lock: int, *, lock_content: bytes | None = None) -> None:
        self.path, self._lock_name, self._lock, self._lock_content = path.absolute(), lock_name, lock, lock_content
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._first_place = _place_of(self._descriptor)
        _owned[self.path] = self

    def end(self) -> None:
        """Forget it, and close its descriptor."""
        if _owned.get(self.path) is self:
            del _owned[self.path]
        os.close(self._descriptor)

    def require(self) -> None:
        """Raise OSError, with what happened, if this process owned the directory and lost it."""
        if (how := self._how_lost()) is not None:
            raise OSError(LOST, how, str(self.path))

    def _how_lost(self) -> str | None:
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            found = None
        if found is None or not os.path.samestat(found, os.fstat(self._descriptor)):
            place = _place_of(self._descriptor)
            how = f"the directory was renamed: its files are in {place}"
            if place.endswith(" (deleted)"):
                how = "the directory was deleted"
            elif place == self._first_place:
                how = f"a link in the path was changed: the files are in {place}"
            return how if found is None else f"{how}; the path leads to another directory now"
        try:
            lock = os.stat(self._lock_name, dir_fd=self._descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return f"{self._lock_name} in it was deleted, so another process may own the directory"
        if not os.path.samestat(lock, os.fstat(self._lock)):
            return f"{self._lock_name} in it was replaced, so another process owns the directory"
        content = self._lock_content
        if content is not None and os.pread(self._lock, len(content) + 1, 0) != content:
            return f"another process has written its name into {self._lock_name}, and owns the directory"
        return None


_owned: dict[Path, OwnedDirectory] = {}


def require_owned(path: Path) -> None:
    """Raise OSError, with what happened, if ``path`` is below a directory that this process owned and lost."""
    path = path.absolute()
    for owned in list(_owned.values()):
        if path.is_relative_to(owned.path):
            owned.require()


def _place_of(directory: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{directory}")
    except OSError:
        return "an unknown place"


def local_path(text: str) -> Path:
    """Return the path ``text``; ``~`` at its beginning is the home directory. Raises ValueError for an unknown user."""
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError(f"Input should be a path: {text!r} has no home directory; write ./~ for a file of this name")
    return Path(path)


def create_file(path: Path) -> BinaryIO:
    """Create ``path`` and open it for writing. What has this name is removed first and not opened: links, too."""
    require_owned(path)
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
    with create_file(draft) as file:
        try:
            yield file
            file.close()
            require_owned(path)
            draft.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                require_owned(path)
                draft.unlink(missing_ok=True)
            raise


def make_directory(path: Path, *, mode: int = 0o777) -> None:
    """Create ``path`` with ``mode``, and its missing parents, unless it exists."""
    require_owned(path)
    path.mkdir(mode=mode, parents=True, exist_ok=True)


def open_to_append(path: Path) -> BinaryIO:
    """Open ``path`` for appending, without a buffer. It is created if it is missing; a link is refused."""
    require_owned(path)
    return open(open_regular(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def open_to_read(path: Path, *, max_nbytes: int | None = None, follow_links: bool = False) -> BufferedReader:
    """Open ``path`` for reading. A file with more than ``max_nbytes`` is refused, and a link unless ``follow_links``.

    A file that is still written may become longer later.
    """
    return open(open_regular(path, os.O_RDONLY, max_nbytes=max_nbytes, follow_links=follow_links), "rb")


def read_file(path: Path, *, max_nbytes: int, follow_links: bool = False) -> bytes:
    """Return the content of ``path``, which must be as :func:`open_to_read` says."""
    with open_to_read(path, max_nbytes=max_nbytes, follow_links=follow_links) as file:
        likely_nbytes = os.fstat(file.fileno()).st_size + 2**20  # Python reserves memory for all that is asked for
        return file.read(min(max_nbytes, likely_nbytes))


def open_regular(
    path: Path, flags: int, mode: int = 0o666, *, max_nbytes: int | None = None, follow_links: bool = False
) -> int:
    """Open ``path`` as ``os.open`` does, and return the descriptor; see :func:`open_to_read` for the conditions."""
    safe = os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow_links else os.O_NOFOLLOW)  # a pipe would wait for its other end
    try:
        descriptor = os.open(path, flags | safe, mode)
    except OSError as exc:
        why = {errno.ELOOP: "it is a symbolic link", errno.ENXIO: "it is a pipe or a socket"}.get(exc.errno or 0)
        if why is None or (follow_links and exc.errno == errno.ELOOP):
            raise
        raise OSError(exc.errno, why, str(path)) from exc
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and (max_nbytes is None or status.st_size <= max_nbytes):
        return descriptor
    os.close(descriptor)
    if stat.S_ISREG(status.st_mode):
        raise OSError(errno.EFBIG, f"it has more than {max_nbytes:,} bytes", str(path))
    raise OSError(errno.EINVAL, "it is not a regular file", str(path))
