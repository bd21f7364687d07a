"""What a device is: :class:`Backend`, its :class:`BackendInfo`, its capabilities, and what a probe answers.

A backend package gives three hooks (:mod:`hwrl.discovery.hookspecs`): its info, a probe, a factory. ``Backend(info)``
is already complete for a device that torch knows; a subclass overrides a method only where the device differs or can
do it faster. This module imports torch inside functions, so that a probe can run before torch is importable.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol

from hwrl.errors import CommError, DeviceMemoryError, UnsupportedError
from hwrl.interfaces import torchapi
from hwrl.interfaces.devicemap import DeviceMap
from hwrl.interfaces.handles import Handle, seal, unseal

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from hwrl.interfaces.comm import Store

API_VERSION = (1, 0)
"""(major, minor) of the plugin interface. A plugin of another major version, or of a newer minor one, is refused."""


class Capability(StrEnum):
    """What a backend may or may not be able to do. Ask with :meth:`Backend.supports`, insist with ``require``."""

    STREAMS = "streams"
    """Work can be queued on a side stream and run while the caller goes on."""
    PINNED_MEMORY = "pinned_memory"
    """Host memory can be page-locked, so that copies to and from the device are asynchronous."""
    REGISTERED_MEMORY = "registered_memory"
    """Host memory that exists already, such as what processes share, can be page-locked where it lies."""
    MEMORY_STATS = "memory_stats"
    """:meth:`Backend.memory_info` counts the bytes that tensors of this process hold on the device."""
    COLLECTIVES = "collectives"
    """torch has a collective library for the device: processes can form groups that move its tensors."""
    COMM_ABORT = "comm_abort"
    """A collective that is blocked can be ended from another thread."""
    SHARED_DEVICE_GROUPS = "shared_device_groups"
    """Two processes that use the same device can be members of one process group."""
    DEVICE_IPC = "device_ipc"
    """Device memory can be opened by another process of the same host."""


@dataclass(frozen=True)
class Support:
    """Whether something works, and why. ``unverified`` means: expected to work, not proven on this device."""

    state: Literal["supported", "unsupported", "unverified"]
    reason: str

    @property
    def usable(self) -> bool:
        """True unless the state is ``unsupported``."""
        return self.state != "unsupported"


@dataclass(frozen=True)
class BackendInfo:
    """The identity of a backend; plain data, needed before anything is imported.

    ``device_type`` is torch's word for the device, kept as a string because torch may not know it yet.
    ``api`` is the version of the plugin interface for which the plugin was written, in figures: never ``API_VERSION``,
    which is the installed one. A plugin that does not give it is refused. ``fallback`` marks a backend that runs
    anywhere: detection takes it only when no evidence of any other device exists and nothing went wrong.
    """

    name: str
    device_type: str
    description: str
    api: tuple[int, int] | None = None
    fallback: bool = False


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on one device. ``free`` and ``total`` are device-wide; the others count this process's tensors."""

    free_nbytes: int
    total_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    peak_nbytes: int


class StreamLike(Protocol):
    """The part of ``torch.Stream`` that hwrl uses."""

    def synchronize(self) -> None:
        """Block the host until everything queued here is done."""

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for ``event``; does not block the host."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for what ``stream`` holds now; does not block the host."""

    def record_event(self, event: Any = None) -> Any:
        """Mark this point of the stream in ``event`` (a new one if None) and return it."""

    def query(self) -> bool:
        """Return whether everything queued here is done."""
        raise NotImplementedError

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


class Backend:
    """One kind of device, in this process.

    Complete for any device with a torch device module; override only what differs. Methods act on the current
    device of the calling thread. None of them is a silent no-op: what a device cannot do raises
    :class:`~hwrl.errors.UnsupportedError`.
    """

    devices: DeviceMap = DeviceMap()

    def __init__(self, info: BackendInfo) -> None:
        self.info = info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name!r} on {self.info.device_type!r}>"

    # -- capabilities -------------------------------------------------------------------------------------------

    def supports(self, capability: Capability) -> Support:
        """Return whether this backend has ``capability``, with the reason."""
        if capability is Capability.SHARED_DEVICE_GROUPS:
            return Support("unsupported", "most collective libraries want a device for each rank")
        if capability is Capability.COLLECTIVES:
            return self._collectives()
        if capability in (Capability.DEVICE_IPC, Capability.COMM_ABORT, Capability.REGISTERED_MEMORY):
            return Support("unsupported", "the backend does not implement it")
        return Support("unverified", "torch's generic implementation, not proven on this device")

    def _collectives(self) -> Support:
        try:
            library = self.comm_library()
        except UnsupportedError as error:
            return Support("unsupported", error.why)
        return Support("unverified", f"torch's {library}, not proven on this device")

    def require(self, capability: Capability, *, needed_for: str) -> None:
        """Raise :class:`~hwrl.errors.UnsupportedError` unless ``capability`` is usable."""
        support = self.supports(capability)
        if not support.usable:
            raise UnsupportedError(
                f"cannot {needed_for}",
                why=f"backend {self.info.name!r} lacks {capability.value!r}: {support.reason}",
                fix="choose another backend, or turn the feature off that needs it",
            )

    # -- device and streams -------------------------------------------------------------------------------------

    @functools.cached_property
    def device_module(self) -> Any:
        """torch's module for this device, for what hwrl does not cover."""
        return torchapi.device_module(self.info.device_type)

    def device(self, index: int | None = None) -> torch.device:
        """Return device ``index``, or the current device of this thread."""
        import torch

        return torch.device(self.info.device_type, self.current_index() if index is None else index)

    def device_count(self) -> int:
        """Return the number of devices that this process sees; 0 is an answer, not an error."""
        return int(torchapi.function(self.info.device_type, "device_count")())

    def why_no_device(self) -> str:
        """Return why :meth:`device_count` is 0, in words; an empty text if this process sees a device."""
        if self.device_count():
            return ""
        variable = self.devices.visible_variable
        if self.devices.visible(os.environ) == ():
            return f"{variable}={os.environ[str(variable)]!r} hides every device from this process"
        shown = f"{variable}={os.environ[variable]!r}" if variable and variable in os.environ else "nothing hides them"
        return (
            f"this process sees no device: the driver shows none ({shown}); install the driver's library, in a "
            f"container too, or name devices that exist"
        )

    def current_index(self) -> int:
        """Return the index of this thread's current device."""
        return int(torchapi.function(self.info.device_type, "current_device")())

    def set_device(self, index: int) -> None:
        """Make device ``index`` this thread's current one. Creates no context by itself."""
        torchapi.function(self.info.device_type, "set_device")(index)

    def device_uuid(self, index: int) -> str | None:
        """Return what identifies device ``index`` on every machine and under every number; None if it does not say."""
        properties = getattr(self.device_module, "get_device_properties", None)
        uuid = "" if properties is None else str(getattr(properties(index), "uuid", None) or "")
        return uuid if uuid.strip("0-") else None

    def synchronize(self) -> None:
        """Block until all work queued on the current device is done."""
        torchapi.function(self.info.device_type, "synchronize", general="synchronize")()

    def stream(self) -> StreamLike:
        """Return a new side stream of the current device; without streams, one whose work is done as it is queued."""
        import torch

        return torch.Stream(device=self.device())  # type: ignore[no-any-return, unused-ignore] # untyped before 2.12

    def current_stream(self) -> StreamLike:
        """Return the stream on which this thread's work is queued."""
        import torch

        return torch.accelerator.current_stream()

    def event(self, *, timing: bool = False) -> Any:
        """Return a ``torch.Event``; with ``timing`` it can measure ``elapsed_time`` in milliseconds."""
        import torch

        return torch.Event(self.info.device_type, enable_timing=timing)

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager that marks a named range in the profiler's timeline."""
        import torch

        return torch.profiler.record_function(name)

    # -- memory -------------------------------------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        """Return what is used and free on the current device."""
        free, total = torchapi.function(self.info.device_type, "mem_get_info", general="get_memory_info")()
        # Once: each of torch's shorter questions asks for all of them.
        stats = torchapi.function(self.info.device_type, "memory_stats", general="memory_stats")()
        return MemoryInfo(
            free_nbytes=free,
            total_nbytes=total,
            allocated_nbytes=stats.get("allocated_bytes.all.current", 0),
            reserved_nbytes=stats.get("reserved_bytes.all.current", 0),
            peak_nbytes=stats.get("allocated_bytes.all.peak", 0),
        )

    @contextlib.contextmanager
    def allocating(self, what: str) -> Iterator[None]:
        """Raise :class:`~hwrl.errors.DeviceMemoryError`, with the device's numbers, if torch runs out of memory inside.

        ``what`` is what the memory is for, as the subject of "does not fit".
        """
        import torch

        try:
            yield
        except torch.OutOfMemoryError as exc:
            raise _out_of_memory(what, str(self.device()), self._numbers(), exc) from exc

    def _numbers(self) -> str:
        """Return what :meth:`memory_info` says, in words; why it says nothing, if it cannot."""
        try:
            info = self.memory_info()
        except UnsupportedError as error:
            return f"how much is free is not known: {error.why}"
        return (
            f"{_gib(info.free_nbytes)} of its {_gib(info.total_nbytes)} are free; tensors of this process hold "
            f"{_gib(info.allocated_nbytes)} (at most {_gib(info.peak_nbytes)}), and {_gib(info.reserved_nbytes)} with "
            f"what its allocator caches"
        )

    def empty_cache(self) -> None:
        """Give unused cached device memory back to the device."""
        torchapi.function(self.info.device_type, "empty_cache", general="empty_cache")()

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of uninitialised page-locked host memory as a 1-d uint8 tensor; the caller owns it."""
        import torch

        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def export_memory(self, memory: torch.Tensor) -> Handle:
        """Return a JSON-able handle with which other processes of this host can open ``memory``.

        ``memory`` is contiguous, on this backend's device and not empty; a part of a larger storage will do. It stays
        the caller's: the handle is good for any number of :meth:`open_memory` as long as this process keeps the
        storage alive. Nothing is ordered between the processes: wait for the device before you tell a reader that
        data is there, and let readers answer before you free the storage or write again. Raises UnsupportedError if
        the backend cannot, or not with memory of this allocator, and CommError for another tensor.
        """
        self.require(Capability.DEVICE_IPC, needed_for="export device memory")
        if memory.device.type != self.info.device_type or not memory.is_contiguous() or memory.numel() == 0:
            raise CommError(
                "cannot export this tensor",
                why=f"it is on {memory.device}, has shape {tuple(memory.shape)} and strides {memory.stride()}",
                fix=f"export a contiguous tensor that is on a device {self.info.device_type!r} and not empty",
            )
        return seal(self._export_memory(memory))

    def open_memory(self, handle: Mapping[str, str | int]) -> torch.Tensor:
        """Return the bytes that another process exported, as a 1-d uint8 tensor over the same memory.

        It lives on the exporter's device, under the number that this process has for it. Its memory is mapped until
        the last tensor over it is gone. Raises UnsupportedError in the exporting process itself, and CommError for a
        handle that is damaged, stale, from another host, or of a device that this process does not see.
        """
        self.require(Capability.DEVICE_IPC, needed_for="open another process's device memory")
        return self._open_memory(unseal(handle))

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        """Return what :meth:`_open_memory` will need; backends with ``device_ipc`` implement both."""
        raise NotImplementedError(f"{self!r} says that it has device_ipc, and does not implement it")

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        """Return the memory of ``handle``, which is unchanged and another process's."""
        raise NotImplementedError(f"{self!r} says that it has device_ipc, and does not implement it")

    def register_host_memory(self, memory: torch.Tensor) -> None:
        """Page-lock ``memory``, 1-d uint8 on the host, where it lies; it stays the caller's.

        Blocks for seconds where there are gigabytes. Call :meth:`unregister_host_memory` before the memory goes.
        """
        self.require(Capability.REGISTERED_MEMORY, needed_for="page-lock host memory where it lies")

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        """End what :meth:`register_host_memory` began; no copy of ``memory`` may be under way."""
        self.require(Capability.REGISTERED_MEMORY, needed_for="release host memory that was page-locked")

    # -- random numbers -----------------------------------------------------------------------------------------

    def rng_state(self) -> torch.Tensor:
        """Return the state of the current device's default generator, a uint8 tensor on the host."""
        state: torch.Tensor = torchapi.function(self.info.device_type, "get_rng_state")()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state that :meth:`rng_state` returned."""
        torchapi.function(self.info.device_type, "set_rng_state")(state)

    # -- collectives: what :mod:`hwrl.comm` builds on -----------------------------------------------------------

    def comm_library(self) -> str:
        """Return the name under which torch.distributed knows this device's collective library.

        Raises UnsupportedError if it knows none.
        """
        import torch.distributed as dist

        try:
            return str(dist.get_default_backend_for_device(self.info.device_type))
        except (ValueError, RuntimeError, AttributeError) as exc:  # RuntimeError: torch does not know the device's name
            raise UnsupportedError(
                "cannot form a process group",
                why=f"torch knows no collective library for device {self.info.device_type!r}: {exc}",
                fix="import the vendor's library in hwrl_create_backend, or use one rank and weights.bypass_cpu=false",
            ) from exc

    def library_timeout(self, timeout_s: float) -> timedelta:
        """Return what to tell torch.distributed, so that the library takes ``timeout_s`` as it is meant."""
        return timedelta(seconds=timeout_s)

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        """Return a process group of its own over ``store``; it joins no default group and changes none.

        All ``size`` ranks must call it with the same ``store`` contents and ``name``. Blocks until the library's own
        rendezvous is done, where it has one.
        """
        from torch.distributed import distributed_c10d as c10d

        # The helper is private but is the only entry that serves built-in and third-party libraries alike, without
        # touching the default group; its annotations differ by version. Replace when torch has a public one.
        helper: Any = c10d._new_process_group_helper
        group: ProcessGroup = helper(size, rank, [], self.comm_library(), store, group_name=name, timeout=timeout)[0]
        c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}  # else it cannot be destroyed
        return group

    def await_work(self, work: Any) -> None:
        """Order this thread's current stream after ``work``, which a group's operation returned.

        Blocks only on a device without streams, until the work is done; may raise what the library found.
        """
        work.wait()

    def abort_process_group(self, group: ProcessGroup) -> None:
        """End every collective of ``group`` that is blocked in another thread, and make the group unusable."""
        self.require(Capability.COMM_ABORT, needed_for="abort a process group")
        group.abort()


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"


def _out_of_memory(what: str, device: str, numbers: str, exc: Exception) -> DeviceMemoryError:
    return DeviceMemoryError(
        f"{what} does not fit in the memory of {device}",
        why=f"{numbers}; torch said: {str(exc).strip().splitlines()[0]}",
        fix="make the parts of a step smaller, offload what is not needed all the time, or use more devices",
    )
