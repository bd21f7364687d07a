"""Share device memory with other processes, through the driver's own IPC calls.

torch's multiprocessing has such calls, too. The driver's calls fit better here: they are documented and do not change
with torch's version; a handle serves any number of readers; and a killed reader leaves no counter behind (with torch
it would keep the exporter's memory until the process ends). Both have the same limit: they share only memory from
``cudaMalloc``, not expandable segments or stream-ordered pools.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import torch

from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Handle

_HANDLE_NBYTES = 64  # CU_IPC_HANDLE_SIZE
_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
_contexts = threading.local()


class _IpcHandle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_ubyte * _HANDLE_NBYTES)]


_SIGNATURES: dict[str, list[Any]] = {
    "cuMemGetAddressRange_v2": [ctypes.POINTER(ctypes.c_uint64), ctypes.POINTER(ctypes.c_size_t), ctypes.c_uint64],
    "cuIpcGetMemHandle": [ctypes.POINTER(_IpcHandle), ctypes.c_uint64],
    "cuIpcOpenMemHandle_v2": [ctypes.POINTER(ctypes.c_uint64), _IpcHandle, ctypes.c_uint],
    "cuIpcCloseMemHandle": [ctypes.c_uint64],
    "cuGetErrorName": [ctypes.c_int, ctypes.POINTER(ctypes.c_char_p)],
}


class _DriverError(Exception):
    """A call of the driver failed; the message has the call and the driver's name of the error."""


def export(memory: torch.Tensor) -> Handle:
    """Return a handle of ``memory``; see :meth:`hwrl.Backend.export_memory`."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
    with _context(memory.device.index):
        try:
            _call("cuMemGetAddressRange_v2", base, size, memory.data_ptr())
            _call("cuIpcGetMemHandle", handle, base)
        except _DriverError as exc:
            raise UnsupportedError(
                "cannot export this memory",
                why=f"{exc}; the driver shares memory of cudaMalloc, not expandable segments or stream-ordered pools",
                fix="take expandable_segments and cudaMallocAsync out of PYTORCH_ALLOC_CONF, or do not use IPC",
            ) from exc
    return {
        "device": _uuid(memory.device.index),
        "memory": bytes(handle.reserved).hex(),
        "offset": memory.data_ptr() - base.value,
        "nbytes": memory.nbytes,
    }


def open(handle: Handle) -> torch.Tensor:
    """Return the memory of ``handle``; see :meth:`hwrl.Backend.open_memory`."""
    raw, offset, nbytes = bytes.fromhex(str(handle["memory"])), int(handle["offset"]), int(handle["nbytes"])
    if len(raw) != _HANDLE_NBYTES or offset < 0 or nbytes < 0:
        raise ValueError(f"{len(raw)} bytes of {_HANDLE_NBYTES}, for {nbytes:,} bytes at {offset:,}")
    index = _reader_of(_index_of(str(handle["device"])))
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    with _context(index):
        try:
            _call("cuIpcOpenMemHandle_v2", base, _IpcHandle.from_buffer_copy(raw), _ENABLE_PEER_ACCESS)
            _call("cuMemGetAddressRange_v2", ctypes.c_uint64(), size, base.value)
        except _DriverError as exc:
            raise CommError(
                "cannot open another process's memory",
                why=f"{exc}; its process must live, keep the tensor, and be in no other IPC namespace",
                fix="open it while the exporter keeps it; share the host's IPC and PID namespaces between containers",
            ) from exc
    if offset + nbytes > size.value:
        _close(base.value, index)
        raise CommError(
            "cannot open another process's memory",
            why=f"it was bytes {offset:,} to {offset + nbytes:,}, but the allocation now has {size.value:,} bytes",
            fix="open it while the exporter keeps the tensor",
        )
    mapping = _Mapping(base.value, index=index, offset=offset, nbytes=nbytes)
    return torch.as_tensor(mapping, device=torch.device("cuda", index))


def _reader_of(exporter: int) -> int:
    """Return the device to map memory of device ``exporter`` for: the current one, if it reads the other directly.

    Its own copies then read the memory. Mapped for its owner, the owner's device would write, and that fails where
    only the reader has mapped the target, as in vLLM's sleeping allocator ("invalid argument" on two H200). For the
    reader, mapping takes 0.6 ms a GB longer, and needs no context on the owner's device, 0.5 GB.
    """
    current = torch.cuda.current_device()
    direct = current == exporter or torch.cuda.can_device_access_peer(current, exporter)
    return current if direct else exporter


class _Mapping:
    """An opened handle. It closes after the last tensor on it is gone, because tensors keep their source alive."""

    def __init__(self, base: int, *, index: int, offset: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (base + offset, False),
            "strides": None,
            "version": 2,
        }
        weakref.finalize(self, _close, base, index).atexit = False  # at exit the driver closes it


def _close(base: int, index: int) -> None:
    with _context(index):
        torch.cuda.current_stream(index).synchronize()  # reads queued before the tensor's end must finish
        _call("cuIpcCloseMemHandle", base)


def _index_of(device: str) -> int:
    visible = [_uuid(index) for index in range(torch.cuda.device_count())]
    if device not in visible:
        raise CommError(
            "cannot open memory of a device that this process does not see",
            why=f"it is on {device}, and visible here are {', '.join(visible) or 'none'}",
            fix="run both processes on one host, and make the exporter's device visible here by CUDA_VISIBLE_DEVICES",
        )
    return visible.index(device)


@functools.cache
def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


@contextlib.contextmanager
def _context(index: int) -> Iterator[None]:
    """Make the device's context current in this thread: the driver's calls need it, and torch creates it late."""
    with torch.cuda.device(index):
        made: set[int] = _contexts.__dict__.setdefault("made", set())
        if index not in made:
            torch.cuda.mem_get_info(index)
            made.add(index)
        yield


def _call(name: str, *args: Any) -> None:
    driver = _driver()
    status = getattr(driver, name)(*args)
    if status:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(status, text)
        raise _DriverError(f"{name} failed with {text.value.decode() if text.value else status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    driver = ctypes.CDLL("libcuda.so.1")
    for name, arguments in _SIGNATURES.items():
        getattr(driver, name).argtypes = arguments
    return driver
