"""Export tensors to other processes: move their storage to a shared memory file, in place."""

from __future__ import annotations

import os
import stat
from typing import Any

import torch

from hwrl.errors import CommError
from hwrl.interfaces import Handle


def export(memory: torch.Tensor) -> Handle:
    """Return a handle of ``memory``; its address changes. See :meth:`hwrl.Backend.export_memory`."""
    fd, _ = memory.untyped_storage()._share_fd_cpu_()
    offset = memory.storage_offset() * memory.element_size()
    inode = os.fstat(fd).st_ino
    return {"pid": os.getpid(), "fd": fd, "inode": inode, "offset": offset, "nbytes": memory.nbytes}


def open(handle: Handle) -> torch.Tensor:
    """Return the memory of ``handle``; see :meth:`hwrl.Backend.open_memory`."""
    pid, fd, inode, offset, nbytes = (int(handle[name]) for name in ("pid", "fd", "inode", "offset", "nbytes"))
    memory = _mapped(pid, fd, inode)
    if not 0 <= offset <= offset + nbytes <= memory.numel():
        raise ValueError(f"bytes {offset:,} to {offset + nbytes:,} of a file of {memory.numel():,}")
    return memory[offset : offset + nbytes]


def _mapped(pid: int, fd: int, inode: int) -> torch.Tensor:
    path = f"/proc/{pid}/fd/{fd}"
    try:
        _check(os.stat(path), path, inode)  # first: opening a device or a pipe has effects
        mine = os.open(path, os.O_RDWR)
    except OSError as exc:
        raise _stale(f"process {pid} shows no open file {fd}: {exc}") from exc
    try:
        status = os.fstat(mine)
        _check(status, path, inode)
        kind: Any = torch.UntypedStorage  # torch's stubs lack the method
        storage: torch.UntypedStorage = kind._new_shared_fd_cpu(mine, status.st_size)
    finally:
        os.close(mine)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _check(status: os.stat_result, path: str, inode: int) -> None:
    """Raise CommError unless the file is the exporter's: memory of this user, closed to others.

    Its size is not fixed: torch's memory files cannot be sealed. A process of this user can shorten one.
    """
    if not stat.S_ISREG(status.st_mode) or status.st_ino != inode:
        raise _stale(f"{path} is another file by now")
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise _stale(f"{path} belongs to another user or is open to others")


def _stale(why: str) -> CommError:
    return CommError(
        "cannot open another process's memory", why=why, fix="open it while the exporter lives and keeps the tensor"
    )
