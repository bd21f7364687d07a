"""The files of the host transport, one version each: how they are made, found and mapped."""

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
import weakref
from dataclasses import dataclass
from pathlib import Path

import torch

from hwrl.errors import TransferFailedError, UnsupportedError, WeightsError
from hwrl.interfaces import Backend
from hwrl.memory.pagelock import PageLocked
from hwrl.weights.destination import FlatVersion
from hwrl.weights.layout import ALIGNMENT_NBYTES, WeightLayout
from hwrl.weights.messages import Proposal, TransportPayload
from hwrl.weights.slabs import Checksums

_log = logging.getLogger("hwrl.weights")
_PREFIX = "hwrl-weights-"
_OPENED = os.O_RDWR | os.O_NONBLOCK  # without O_NONBLOCK, opening a pipe would block
_HEADER = struct.Struct("<qq")  # the proposal's number; the number of slabs written, plus one after the checksums


@dataclass(frozen=True)
class HostPayload(TransportPayload):
    """The version is in file number ``slot`` of ``files``, which the sender has made so far.

    ``files`` are file names in ``directory``. If ``directory`` is empty, they are file descriptors of process ``pid``.
    ``inodes`` identify the files.
    """

    directory: str
    pid: int
    slot: int
    files: tuple[int, ...]
    inodes: tuple[int, ...]


def payload_of(proposal: Proposal) -> HostPayload:
    """Return the payload of a host proposal."""
    assert isinstance(proposal.payload, HostPayload), "proposals are read with their transport's payload"
    return proposal.payload


class MemoryFiles:
    """Makes files in memory, without a directory. They vanish when the last process closes or unmaps them.

    Other processes of the same user open them under ``/proc/<pid>/fd``, as long as this process lives.
    """

    directory = ""

    def make(self, slot: int, *, nbytes: int) -> int:
        """Return a new file of ``nbytes``, sealed against shortening: reading a missing part would kill a reader."""
        try:
            file = os.memfd_create(f"{_PREFIX}{slot}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as exc:
            raise _cannot_store(nbytes, "memory", exc) from exc
        os.fchmod(file, 0o600)
        _allocate(file, nbytes=nbytes, where="memory")
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        return file

    def number(self, slot: int, file: int) -> int:
        """Return the number under which receivers find ``file``."""
        return file

    def close(self) -> None:
        """Do nothing: files vanish when they are closed."""


class DirectoryFiles:
    """Makes files in a new directory under ``base``. ``close`` deletes the directory.

    A killed process leaves its directory behind, and the next process that uses ``base`` deletes it. A forked child
    does not own the directory, so it keeps no dead sender's directory and deletes no living sender's.
    """

    def __init__(self, base: Path) -> None:
        _delete_abandoned(base)
        made, owner = _new_directory(base)
        self.directory = str(made)
        self._disown = weakref.finalize(self, os.close, owner)
        self._disown.atexit = False  # the end of the process releases the lock
        _owned.add(self)

    def make(self, slot: int, *, nbytes: int) -> int:
        """Return a new file of ``nbytes``."""
        file = os.open(Path(self.directory, str(slot)), os.O_RDWR | os.O_CREAT, 0o600)
        _allocate(file, nbytes=nbytes, where=self.directory)
        return file

    def number(self, slot: int, file: int) -> int:
        """Return the number under which receivers find ``file``."""
        return slot

    def close(self) -> None:
        """Delete the files, unless this process does not own them. May be called again."""
        if self._disown.alive:
            shutil.rmtree(self.directory, ignore_errors=True)
            self.disown()

    def disown(self) -> None:
        """Release the lock that marks the directory as this process's."""
        self._disown()


def version_files(directory: Path | None) -> MemoryFiles | DirectoryFiles:
    """Return the maker of files in ``directory``, or in memory; if the system cannot, in the temporary directory."""
    if directory is None:
        try:
            os.close(os.memfd_create(_PREFIX, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
            return MemoryFiles()
        except (AttributeError, OSError) as exc:  # an old system, or one that forbids the call
            directory = Path(tempfile.gettempdir())
            _log.warning("this system makes no files in memory (%s): versions of weights are in %s", exc, directory)
    return DirectoryFiles(directory)


_owned: weakref.WeakSet[DirectoryFiles] = weakref.WeakSet()


def _disown_in_child() -> None:
    for files in list(_owned):
        files.disown()


os.register_at_fork(after_in_child=_disown_in_child)


def _allocate(file: int, *, nbytes: int, where: str) -> None:
    try:
        os.posix_fallocate(file, 0, nbytes)  # a write to a sparse file would kill the process when memory runs out
    except OSError as exc:
        os.close(file)
        raise _cannot_store(nbytes, where, exc) from exc


def _cannot_store(nbytes: int, where: str, exc: OSError) -> WeightsError:
    return WeightsError(
        f"cannot store another version of {nbytes:,} bytes in {where}",
        why=str(exc),
        fix="free memory there, or give the sender a directory with room",
    )


def open_version_file(proposal: Proposal, slot: int, layout: WeightLayout, *, backend: Backend) -> VersionFile:
    """Map file ``slot`` of the proposal's sender.

    Raises TransferFailedError if the file is missing or is not the sender's.
    """
    payload = payload_of(proposal)
    file = _open(proposal, slot)
    try:
        why = _why_unusable(file, payload, slot)
        if why is None:
            return VersionFile(file, layout, backend=backend)
    except (OSError, ValueError, RuntimeError) as exc:
        why = f"{type(exc).__name__}: {exc}"
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    raise TransferFailedError(f"version {proposal.version} cannot be read", why=why, fix="publish again")


def is_alive(payload: HostPayload) -> bool:
    """Return whether the sender still has its files open."""
    try:
        if payload.directory:
            return _is_owned(Path(payload.directory))
        return os.stat(_path(payload, payload.slot)).st_ino == payload.inodes[payload.slot]
    except (OSError, ValueError):
        return False


def _path(payload: HostPayload, slot: int) -> str:
    return f"{payload.directory or f'/proc/{payload.pid}/fd'}/{payload.files[slot]}"


def _open(proposal: Proposal, slot: int) -> int:
    """Open the file if it is a memory file, or in a private directory, such as this user's senders make.

    The payload comes from the store, so its paths are not trusted.
    """
    payload = payload_of(proposal)
    try:
        return _open_in_directory(payload, slot) if payload.directory else _open_in_memory(payload, slot)
    except OSError as exc:
        raise TransferFailedError(
            f"version {proposal.version} is not on this host",
            why=f"{exc}: its sender has closed it, is dead, or runs as another user or on another host",
            fix="publish again; use transport='device' between hosts, and directory=… between containers",
        ) from exc
    except ValueError as exc:
        raise TransferFailedError(
            f"version {proposal.version} cannot be read", why=str(exc), fix="publish again"
        ) from exc


def _open_in_directory(payload: HostPayload, slot: int) -> int:
    directory = _open_senders(Path(payload.directory))
    try:
        return os.open(str(payload.files[slot]), _OPENED | os.O_NOFOLLOW, dir_fd=directory)
    finally:
        os.close(directory)


def _open_in_memory(payload: HostPayload, slot: int) -> int:
    path = _path(payload, slot)
    if not os.readlink(path).startswith(f"/memfd:{_PREFIX}"):  # check first, because opening a device has effects
        raise ValueError(f"{path} is now another file")
    return os.open(path, _OPENED)


def _open_senders(directory: Path) -> int:
    """Open the directory of a sender of this user. Raises OSError or ValueError if it is not such a directory."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    status = os.fstat(opened)
    if directory.name.startswith(_PREFIX) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return opened
    os.close(opened)
    raise ValueError(f"{directory} is not a sender's directory, belongs to another user, or is open to others")


def _why_unusable(file: int, payload: HostPayload, slot: int) -> str | None:
    """Return why ``file`` must not be used, or None if it is the sender's."""
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode) or status.st_ino != payload.inodes[slot]:
        return f"{_path(payload, slot)} is now another file"
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        return f"{_path(payload, slot)} belongs to another user or is open to others"
    if not payload.directory and not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return f"{_path(payload, slot)} is not a memory file of fixed size"
    return None


class VersionFile:
    """A file that holds one version at a time, mapped by this process.

    ``slabs`` and ``sums`` are views of the file's page-locked memory. A header is between them.
    """

    def __init__(self, descriptor: int, layout: WeightLayout, *, backend: Backend) -> None:
        self.descriptor, self._header_at = descriptor, _header_at(layout)
        at, nbytes = _sums_at(layout), version_nbytes(layout)
        found = os.fstat(descriptor).st_size
        if found != nbytes:  # a read beyond the end would kill this process
            raise ValueError(f"the file has {found:,} bytes, and this layout takes {nbytes:,}")
        mapping = mmap.mmap(descriptor, nbytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self.slabs = FlatVersion(layout, flat=memory).slabs
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
        """Assign the file to proposal ``number`` and set its count of finished slabs to 0.

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

    def announce(self, slabs: int) -> int:
        """Write ``slabs`` into the header, the number of slabs written (one more after the checksums); return it."""
        os.pwrite(self.descriptor, _HEADER.pack(self._number, slabs), self._header_at)
        return slabs

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
        number, slabs = _HEADER.unpack(os.pread(self.descriptor, _HEADER.size, self._header_at))
        return number, slabs

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


def _new_directory(base: Path) -> tuple[Path, int]:
    # Lock it before it gets the name that _delete_abandoned looks for.
    made = Path(tempfile.mkdtemp(prefix=".hwrl-new-", dir=base))
    owner = os.open(made / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(owner, fcntl.LOCK_EX)
    final = base / (_PREFIX + made.name.removeprefix(".hwrl-new-"))
    made.rename(final)
    return final, owner


def _delete_abandoned(base: Path) -> None:
    """Delete the directories of dead senders of this user."""
    for left in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError):  # it is another user's, or was just deleted
            if not _is_owned(left):
                shutil.rmtree(left)


def _is_owned(directory: Path) -> bool:
    """Return whether the process that made ``directory`` lives, by the lock that it holds there.

    Raises OSError or ValueError if it is not the directory of a sender of this user.
    """
    place = _open_senders(directory)
    try:
        owner = os.open("owner", _OPENED | os.O_NOFOLLOW, dir_fd=place)
    except FileNotFoundError:
        return False
    finally:
        os.close(place)
    try:
        fcntl.flock(owner, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(owner)
    return False
