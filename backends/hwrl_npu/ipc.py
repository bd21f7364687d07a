"""Share device memory with other processes, through torch_npu's calls for torch.multiprocessing.

These handles support both kinds of memory segments. But torch_npu counts a handle's readers, and keeps the exporter's
memory until the expected number of readers has closed it. Our handles serve any number of readers, and readers may be
killed. So the exporter releases the counter at once, and readers do not count.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import DeviceMap, Handle

_NO_EVENT = bytes(64)  # ACL_IPC_EVENT_HANDLE_SIZE
_NO_COUNTER = b"/hwrl-counts-no-readers"  # a file that does not exist; torch_npu ignores it


def export(memory: torch.Tensor, *, devices: DeviceMap) -> Handle:
    """Return a handle of ``memory``; see :meth:`hwrl.Backend.export_memory`."""
    storage: Any = memory.untyped_storage()
    try:
        index, handle, _, offset, counter, place, _, _ = storage._share_npu_()
    except RuntimeError as exc:
        raise UnsupportedError(
            "cannot export this memory",
            why=_reason(exc),
            fix="needs a driver of 25.3 and CANN 8.3 or newer, and a tensor in base format; or do not use IPC",
        ) from exc
    torch.UntypedStorage._release_ipc_counter_npu(counter, place)  # type: ignore[attr-defined]  # torch_npu's
    return {
        "device": devices.to_physical(index, os.environ),
        "memory": handle.hex(),
        "offset": offset + memory.storage_offset() * memory.element_size(),
        "nbytes": memory.nbytes,
    }


def open(handle: Handle, *, devices: DeviceMap) -> torch.Tensor:
    """Return the memory of ``handle``; see :meth:`hwrl.Backend.open_memory`."""
    raw = bytes.fromhex(str(handle["memory"]))
    index = _index_of(int(handle["device"]), devices)
    offset, nbytes = int(handle["offset"]), int(handle["nbytes"])
    if offset < 0 or nbytes < 0:
        raise ValueError(f"{nbytes:,} bytes at {offset:,}")
    kind: Any = torch.UntypedStorage
    # Use the device first: the next call crashes otherwise.
    memory = torch.empty(0, dtype=torch.uint8, device=torch.device("npu", index))
    try:
        storage = kind._new_shared_npu(index, raw, nbytes, offset, _NO_COUNTER, 0, _NO_EVENT, False)
    except RuntimeError as exc:
        raise CommError(
            "cannot open another process's memory",
            why=_reason(exc),
            fix="open it while the exporter lives and keeps the tensor, on the same host",
        ) from exc
    return memory.set_(storage)


def _index_of(physical: int, devices: DeviceMap) -> int:
    count = torch.get_device_module("npu").device_count()
    visible = [devices.to_physical(index, os.environ) for index in range(count)]
    if physical not in visible:
        raise CommError(
            "cannot open memory of a device that this process does not see",
            why=f"it is on NPU {physical}, and visible here are {', '.join(map(str, visible)) or 'none'}",
            fix=f"run both on one host, and make the exporter's device visible here by {devices.visible_variable}",
        )
    return visible.index(physical)


def _reason(exc: Exception) -> str:
    return str(exc).strip().splitlines()[0]
