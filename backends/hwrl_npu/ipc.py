"""Device memory that other processes open, through what torch_npu gives torch.multiprocessing.

Its handles know both kinds of segments. It counts a handle's readers, however, and keeps the exporter's memory until as
many as were expected have closed it. A handle of ours serves any number, who may be killed; so its count is given back
when it is made, and readers count nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
import zlib
from collections.abc import Mapping
from typing import Any

import torch

from hwrl.backend import DeviceMap
from hwrl.errors import CommError, UnsupportedError

_FIELDS = {"process": str, "device": int, "memory": str, "offset": int, "nbytes": int, "sum": int}
_LOADED = uuid.uuid4().hex
_NO_EVENT = bytes(64)  # ACL_IPC_EVENT_HANDLE_SIZE
_NO_COUNTER = b"/hwrl-counts-no-readers"  # a shared memory file that does not exist: torch_npu ignores that


def export(memory: torch.Tensor, *, devices: DeviceMap) -> dict[str, str | int]:
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
    made: dict[str, str | int] = {
        "process": _process(),
        "device": devices.to_physical(index, os.environ),
        "memory": handle.hex(),
        "offset": offset + memory.storage_offset() * memory.element_size(),
        "nbytes": memory.nbytes,
    }
    return made | {"sum": _sum(made)}


def open(handle: Mapping[str, str | int], *, devices: DeviceMap) -> torch.Tensor:
    """Return the memory of ``handle``; see :meth:`hwrl.Backend.open_memory`."""
    raw = _checked(handle)
    index = _index_of(int(handle["device"]), devices)
    offset, nbytes = int(handle["offset"]), int(handle["nbytes"])
    kind: Any = torch.UntypedStorage
    memory = torch.empty(0, dtype=torch.uint8, device=torch.device("npu", index))  # the call crashes before first use
    try:
        storage = kind._new_shared_npu(index, raw, nbytes, offset, _NO_COUNTER, 0, _NO_EVENT, False)
    except RuntimeError as exc:
        raise CommError(
            "cannot open another process's memory",
            why=_reason(exc),
            fix="open it while the exporter lives and keeps the tensor, on the same host",
        ) from exc
    return memory.set_(storage)


def _checked(handle: Mapping[str, str | int]) -> bytes:
    """Return torch_npu's part of ``handle``, once all of it can be right."""
    wrong = [name for name, kind in _FIELDS.items() if type(handle.get(name)) is not kind]
    with contextlib.suppress(ValueError):
        raw = b"" if wrong else bytes.fromhex(str(handle["memory"]))
        if raw and handle["sum"] == _sum(handle):
            if handle["process"] == _process():
                raise UnsupportedError(
                    "cannot open the memory of this process itself",
                    why="the driver maps memory into other processes only",
                    fix="use the tensor that was exported",
                )
            return raw
    raise CommError(
        "this is no handle of device memory",
        why=f"{', '.join(wrong) or 'the sum of its fields'} cannot be right in {dict(handle)!r:.200}",
        fix="pass on unchanged what export_memory returned",
    )


def _sum(handle: Mapping[str, str | int]) -> int:
    """Return a checksum of what is in ``handle``; a reader cannot ask the driver how large the memory is."""
    return zlib.crc32(json.dumps([handle[name] for name in _FIELDS if name != "sum"]).encode())


def _index_of(physical: int, devices: DeviceMap) -> int:
    count = torch.get_device_module("npu").device_count()
    visible = [devices.to_physical(index, os.environ) for index in range(count)]
    if physical not in visible:
        raise CommError(
            "cannot open memory of a device that this process does not see",
            why=f"it is on NPU {physical}, and visible here are {', '.join(map(str, visible)) or 'none'}",
            fix=f"run both on one host, and show this process the exporter's device in {devices.visible_variable}",
        )
    return visible.index(physical)


def _process() -> str:
    return f"{os.getpid()}-{_LOADED}"  # a number is used again, a forked child has its parent's name


def _reason(exc: Exception) -> str:
    return str(exc).strip().splitlines()[0]
