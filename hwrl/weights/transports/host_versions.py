"""The files of the host transport, one version each: how they are made, found and mapped."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import stat
import struct
import tempfile
from dataclasses import dataclass

import torch

from hwrl.errors import TransferFailedError, UnsupportedError, WeightsError
from hwrl.interfaces import Backend
from hwrl.memory.pool import PageLocked
from hwrl.weights.buckets import Checksums
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout
from hwrl.weights.messages import Proposal, TransportPayload

_log = logging.getLogger("hwrl.weights")
_PREFIX = "hwrl-weights-"
_HEADER = struct.Struct("<qq")  # the proposal's number; the number of buckets written, plus one after the checksums


@dataclass(frozen=True)
class HostPayload(TransportPayload):
    """The version is in file number ``slot`` of ``files``, which the sender has made so far.

    ``files`` are file descriptors of process ``pid``. ``inodes`` identify the files.
    """

    pid: int
    slot: int
    files: tuple[int, ...]
    inodes: tuple[int, ...]


def make_file(slot: int, *, nbytes: int) -> int:
    """Return a new file of ``nbytes`` that no directory shows. It vanishes when the last process closes or unmaps it.

    Other processes of the same user open it under ``/proc/<pid>/fd``, as long as this process lives. It is in memory,
    and sealed against shortening: reading a missing part would kill a reader. If the system makes no files in memory,
    it is in the temporary directory, already deleted there.
    """
    where = "memory"
    try:
        try:
            file = os.memfd_create(f"{_PREFIX}{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except (AttributeError, OSError) as exc:  # an old system, or one that forbids the call
            where = tempfile.gettempdir()
            _log.warning("this system makes no files in memory (%s): versions of weights are in %s", exc, where)
            file, path = tempfile.mkstemp(prefix=_PREFIX)
            os.unlink(path)
        try:
            os.fchmod(file, 0o600)
            os.posix_fallocate(file, 0, nbytes)  # a write to a sparse file would kill the process without memory
            if where == "memory":
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except OSError:
            os.close(file)
            raise
    except OSError as exc:
        raise WeightsError(
            f"cannot store another version of {nbytes:,} bytes in {where}", why=str(exc), fix="free memory there"
        ) from exc
    return file


def open_version_file(proposal: Proposal, slot: int, layout: WeightLayout, *, backend: Backend) -> VersionFile:
    """Map file ``slot`` of the proposal's sender. The payload comes from the store: it is not trusted.

    Raises TransferFailedError if the file is missing or is not one that the sender made by :func:`make_file`.
    """
    payload, file = proposal.payload, -1
    path = _path(payload, slot)
    try:
        name = os.path.basename(os.readlink(path))  # check first, because opening a device has effects
        if not (name.startswith((f"memfd:{_PREFIX}", _PREFIX)) and name.endswith(" (deleted)")):
            raise ValueError(f"{path} is now another file")
        file = os.open(path, os.O_RDWR | os.O_NONBLOCK)  # without O_NONBLOCK, opening a pipe would block
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_ino != payload.inodes[slot]:
            raise ValueError(f"{path} is now another file")
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ValueError(f"{path} belongs to another user or is open to others")
        if name.startswith("memfd:") and not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise ValueError(f"{path} is not a memory file of fixed size")
        return VersionFile(file, layout, backend=backend)
    except BaseException as exc:
        if file >= 0:
            os.close(file)
        elif isinstance(exc, OSError):
            raise TransferFailedError(
                f"version {proposal.version} is not on this host",
                why=f"{exc}: its sender has closed it, is dead, or runs as another user, in another container or host",
                fix="publish again; use transport='device' between hosts or containers",
            ) from exc
        if isinstance(exc, OSError | ValueError | RuntimeError):
            what = f"version {proposal.version} cannot be read"
            raise TransferFailedError(what, why=str(exc), fix="publish again") from exc
        raise


def is_alive(payload: HostPayload) -> bool:
    """Return whether the sender still has its files open."""
    try:
        return os.stat(_path(payload, payload.slot)).st_ino == payload.inodes[payload.slot]
    except (OSError, ValueError):
        return False


def _path(payload: HostPayload, slot: int) -> str:
    return f"/proc/{payload.pid}/fd/{payload.files[slot]}"


class VersionFile:
    """A file that holds one version at a time, mapped by this process.

    ``buckets`` and ``sums`` are views of the file's page-locked memory. A header is between them.
    """

    def __init__(self, descriptor: int, layout: WeightLayout, *, backend: Backend) -> None:
        self.descriptor, self._header_at = descriptor, _header_at(layout)
        at, nbytes = _sums_at(layout), version_nbytes(layout)
        found = os.fstat(descriptor).st_size
        if found != nbytes:  # a read beyond the end would kill this process
            raise ValueError(f"the file has {found:,} bytes, and this layout takes {nbytes:,}")
        mapping = mmap.mmap(descriptor, nbytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.buckets = [memory[bucket.offset : bucket.offset + bucket.nbytes] for bucket in layout.buckets]
        self.sums = memory[at : at + Checksums.nbytes(layout)].view(torch.int64)
        self._lock: PageLocked | None = None
        try:
            self._lock = PageLocked(mapping, backend=backend)
        except UnsupportedError as exc:
            _log.warning("weights on the host are not page-locked, so copies are slower: %s", exc)

    @property
    def inode(self) -> int:
        """Identifies the file: another file may later get the same path."""
        return os.fstat(self.descriptor).st_ino

    # -- the writer -------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> bool:
        """Assign the file to proposal ``number`` and set its count of finished buckets to 0.

        Return False if a receiver is reading the file.
        """
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        self._number = number
        self.announce(0)
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)
        return True

    def announce(self, buckets: int) -> int:
        """Write ``buckets`` written (one more after the checksums) into the header; return the number."""
        os.pwrite(self.descriptor, _HEADER.pack(self._number, buckets), self._header_at)
        return buckets

    # -- a reader ---------------------------------------------------------------------------------------------------

    def hold(self, number: int) -> bool:
        """Lock the file against overwriting until :meth:`unlock`; return whether it holds proposal ``number``."""
        try:
            fcntl.flock(self.descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:  # the sender is giving it to another proposal
            return False
        return self._header()[0] == number

    def unlock(self) -> None:
        """Let the sender overwrite the file."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def written(self) -> int:
        """Return the number in the header."""
        return self._header()[1]

    def _header(self) -> tuple[int, int]:
        number, buckets = _HEADER.unpack(os.pread(self.descriptor, _HEADER.size, self._header_at))
        return number, buckets

    def close(self) -> None:
        """Unlock the pages and close the file. The memory is unmapped when this object is deleted."""
        if self._lock is not None:
            self._lock.close()
        os.close(self.descriptor)


def _header_at(layout: WeightLayout) -> int:
    return layout.nbytes + -layout.nbytes % ALIGNMENT_NBYTES


def version_nbytes(layout: WeightLayout) -> int:
    """Return the size of one version's file."""
    return _sums_at(layout) + Checksums.nbytes(layout)


def _sums_at(layout: WeightLayout) -> int:
    return _header_at(layout) + ALIGNMENT_NBYTES
