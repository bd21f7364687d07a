"""The files that hold the versions of the host transport: where they lie, and how both ends map them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import stat
import struct
import tempfile
from pathlib import Path

import torch

from hwrl.errors import TransferFailedError, UnsupportedError, WeightsError
from hwrl.interfaces import Backend
from hwrl.memory.pagelock import PageLocked
from hwrl.weights.board import Offer
from hwrl.weights.buffer import Staging
from hwrl.weights.checksum import Checksums
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout

_log = logging.getLogger("hwrl.weights")
_PREFIX = "hwrl-weights-"
_HEADER = struct.Struct("<qq")  # the offer's number, and how many slabs are there; one more when the checksums are


class MemoryFiles:
    """Makes files in memory that no directory shows: they vanish with the last process that has them open or mapped.

    Other processes of the same user open them by this process's number, as long as it lives.
    """

    directory = ""

    def make(self, slot: int, *, nbytes: int) -> int:
        """Return a new file of ``nbytes``, which nobody can shorten: reading what is cut off would kill a reader."""
        file = os.memfd_create(f"{_PREFIX}{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        _allocate(file, nbytes=nbytes, where="memory")
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return file

    def number(self, slot: int, file: int) -> int:
        """Return the number by which receivers find ``file``."""
        return file

    def close(self) -> None:
        """Return: closed files are gone."""


class DirectoryFiles:
    """Makes files in a new directory under ``base``, which is deleted on ``close``.

    A killed process leaves it, and the next one that uses ``base`` deletes it.
    """

    def __init__(self, base: Path) -> None:
        _sweep(base)
        made, self._owner = _new_directory(base)
        self.directory = str(made)

    def make(self, slot: int, *, nbytes: int) -> int:
        """Return a new file of ``nbytes``."""
        file = os.open(Path(self.directory, str(slot)), os.O_RDWR | os.O_CREAT, 0o600)
        _allocate(file, nbytes=nbytes, where=self.directory)
        return file

    def number(self, slot: int, file: int) -> int:
        """Return the number by which receivers find ``file``."""
        return slot

    def close(self) -> None:
        """Delete the files."""
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._owner)


def _allocate(file: int, *, nbytes: int, where: str) -> None:
    try:
        os.posix_fallocate(file, 0, nbytes)  # a sparse file would kill the process when the memory runs out
    except OSError as exc:
        os.close(file)
        raise WeightsError(
            f"cannot keep another version of {nbytes:,} bytes in {where}", why=str(exc), fix="free memory there"
        ) from exc


def open_place(offer: Offer, slot: int, layout: WeightLayout, *, backend: Backend) -> SharedPlace:
    """Return place ``slot`` of the sender of ``offer``, as this process maps it.

    Raises TransferFailedError if it is not there, or is not what the sender made.
    """
    file = _open(offer, slot)
    try:
        why = _why_not(file, offer, slot)
        if why is None:
            return SharedPlace(file, layout, backend=backend)
    except (OSError, ValueError, RuntimeError) as exc:
        why = f"{type(exc).__name__}: {exc}"
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    raise TransferFailedError(f"version {offer.version} cannot be read", why=why, fix="publish again")


def is_alive(offer: Offer) -> bool:
    """Return whether the sender of ``offer`` still has its files."""
    if offer.directory:
        return _is_owned(Path(offer.directory))
    try:
        return os.stat(_path(offer, offer.slot)).st_ino == offer.inodes[offer.slot]
    except OSError:
        return False


def _path(offer: Offer, slot: int) -> str:
    return f"{offer.directory or f'/proc/{offer.pid}/fd'}/{offer.files[slot]}"


def _open(offer: Offer, slot: int) -> int:
    try:
        return os.open(_path(offer, slot), os.O_RDWR | os.O_NONBLOCK)  # a pipe would block
    except (OSError, ValueError) as exc:
        raise TransferFailedError(
            f"version {offer.version} is not on this host",
            why=f"{exc}: its sender has closed it, is dead, runs as another user, or runs on another host",
            fix="publish again; use transport='device' between hosts, and directory=… between containers",
        ) from exc


def _why_not(file: int, offer: Offer, slot: int) -> str | None:
    """Return why ``file`` is not the one that the sender of ``offer`` made, or None if it is."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != offer.inodes[slot]:
        return f"{_path(offer, slot)} is another file by now"
    if not offer.directory and not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return f"{_path(offer, slot)} is no memory file whose size is fixed"
    return None


class SharedPlace:
    """One version's file as one process maps it: ``slabs`` and ``sums``, page-locked, and a header between them."""

    def __init__(self, file: int, layout: WeightLayout, *, backend: Backend) -> None:
        self.file, self._header_at = file, _header_at(layout)
        at, nbytes = _sums_at(layout), place_nbytes(layout)
        found = os.fstat(file).st_size
        if found != nbytes:  # reading what is not there would kill this process
            raise ValueError(f"the file has {found:,} bytes, and this layout takes {nbytes:,}")
        mapping = mmap.mmap(file, nbytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.slabs = Staging(layout, flat=memory).slabs
        self.sums = memory[at : at + Checksums.nbytes(layout)].view(torch.int64)
        self._lock: PageLocked | None = None
        try:
            self._lock = PageLocked(mapping, backend=backend)
        except UnsupportedError as exc:
            _log.warning("weights on the host are not page-locked, which slows copies down: %s", exc)

    @property
    def inode(self) -> int:
        """What tells the file from others that the system may show at its place."""
        return os.fstat(self.file).st_ino

    # -- the writer -------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> bool:
        """Make the place offer ``number``'s, with no slab there; return False if a receiver reads it."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._number = number
        self.announce(0)
        fcntl.flock(self.file, fcntl.LOCK_UN)
        return True

    def announce(self, slabs: int) -> int:
        """Say how many slabs are there, one more when the checksums are as well; return the number."""
        os.pwrite(self.file, _HEADER.pack(self._number, slabs), self._header_at)
        return slabs

    # -- a reader ---------------------------------------------------------------------------------------------------

    def claim(self, number: int) -> bool:
        """Keep the place as it is until :meth:`release`; return whether it is offer ``number``'s."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # this very moment it becomes another one's
            return False
        return self._header()[0] == number

    def release(self) -> None:
        """Let the writer have the place."""
        fcntl.flock(self.file, fcntl.LOCK_UN)

    def written(self) -> int:
        """Return what the writer announced last."""
        return self._header()[1]

    def _header(self) -> tuple[int, int]:
        number, slabs = _HEADER.unpack(os.pread(self.file, _HEADER.size, self._header_at))
        return number, slabs

    def close(self) -> None:
        """Unlock the memory and close the file; the memory is unmapped with this object."""
        if self._lock is not None:
            self._lock.close()
        os.close(self.file)


def _header_at(layout: WeightLayout) -> int:
    return layout.nbytes + -layout.nbytes % ALIGNMENT_NBYTES


def place_nbytes(layout: WeightLayout) -> int:
    """Return the size of one version's file."""
    return _sums_at(layout) + Checksums.nbytes(layout)


def _sums_at(layout: WeightLayout) -> int:
    return _header_at(layout) + ALIGNMENT_NBYTES


def _new_directory(base: Path) -> tuple[Path, int]:
    # Locked before it gets the name that _sweep looks for.
    made = Path(tempfile.mkdtemp(prefix=".hwrl-new-", dir=base))
    owner = os.open(made / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    final = base / (_PREFIX + made.name.removeprefix(".hwrl-new-"))
    made.rename(final)
    return final, owner


def _sweep(base: Path) -> None:
    """Delete the directories whose sender is gone."""
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone meanwhile
            if not _is_owned(left):
                shutil.rmtree(left)


def _is_owned(directory: Path) -> bool:
    """Return whether the sender that made ``directory`` lives: as long as it does, it holds a lock there."""
    try:
        owner = os.open(directory / "owner", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(owner)
    return False
