"""Export tensors to other processes: move their storage to a shared memory file, in place."""

from __future__ import annotations

import os
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
    return _mapped(pid, fd, inode)[offset : offset + nbytes]


def _mapped(pid: int, fd: int, inode: int) -> torch.Tensor:
    try:
        mine = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    except OSError as exc:
        raise _stale(f"process {pid} shows no open file {fd}: {exc}") from exc
    try:
        status = os.fstat(mine)
        if status.st_ino != inode:
            raise _stale(f"file {fd} of process {pid} is another one by now")
        kind: Any = torch.UntypedStorage  # torch's stubs lack the method
        storage: torch.UntypedStorage = kind._new_shared_fd_cpu(mine, status.st_size)
    finally:
        os.close(mine)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _stale(why: str) -> CommError:
    return CommError(
        "cannot open another process's memory", why=why, fix="open it while the exporter lives and keeps the tensor"
    )
