"""The interface of a device: :class:`Backend`, its :class:`BackendInfo` and its capabilities.

A backend package implements three hooks (:mod:`hwrl.discovery.hookspecs`): its info, a probe, a factory.
``Backend(info)`` works for every device known to torch. A subclass overrides a method if its device behaves differently
or has a faster implementation. This module imports torch inside functions only: a probe may run where torch cannot be
imported.
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

from hwrl.errors import CommError, ConfigError, DeviceMemoryError, UnsupportedError
from hwrl.interfaces import torchapi
from hwrl.interfaces.devicemap import DeviceMap
from hwrl.interfaces.handles import Handle, seal, unseal
from hwrl.interfaces.varlen import PaddedAttention

if TYPE_CHECKING:
    import torch
    from torch._C._distributed_c10d import Store  # torch.distributed has it, too, but not for type checkers
    from torch.distributed import ProcessGroup

API_VERSION = (1, 0)
"""(major, minor) of the plugin interface. hwrl refuses plugins of another major or a newer minor version."""


class Capability(StrEnum):
    """Features that some devices lack. :meth:`Backend.supports` checks for one; :meth:`Backend.require` raises."""

    STREAMS = "streams"
    """Work on a side stream runs while the caller continues."""
    PINNED_MEMORY = "pinned_memory"
    """The backend allocates page-locked host memory, so copies to and from the device are asynchronous."""
    REGISTERED_MEMORY = "registered_memory"
    """Existing host memory, such as shared memory, can be page-locked in place."""
    MEMORY_STATS = "memory_stats"
    """:meth:`Backend.memory_info` counts the bytes that tensors of this process hold on the device."""
    COLLECTIVES = "collectives"
    """torch has a collective library for the device. Without it, :mod:`hwrl.comm` stages groups through the host."""
    REDUCE_AVERAGE = "reduce_average"
    """The collective library averages. Without it, FSDP2's gradients are summed and divided."""
    COMM_ABORT = "comm_abort"
    """Another thread can end a blocked collective."""
    SHARED_DEVICE_GROUPS = "shared_device_groups"
    """Two processes on the same device can join one process group."""
    DEVICE_IPC = "device_ipc"
    """Another process of the same host can open device memory."""
    VARLEN_ATTENTION = "varlen_attention"
    """A fused kernel computes :meth:`Backend.varlen_attention`. Without it, sequences are padded to the longest."""
    COMPILED_TRAINING = "compiled_training"
    """Compiling a model's layers makes training faster."""


@dataclass(frozen=True)
class Support:
    """Whether a feature works, and why. ``unverified`` means: expected to work, not proven on this device."""

    state: Literal["supported", "unsupported", "unverified"]
    reason: str

    @property
    def usable(self) -> bool:
        """True unless the state is ``unsupported``."""
        return self.state != "unsupported"


@dataclass(frozen=True)
class BackendInfo:
    """The identity of a backend: plain data, read before anything is imported.

    ``device_type`` is torch's name for the device; it is a string, because torch may not know the device yet. ``api``
    is the version of the plugin interface for the backend's code, as two literal numbers: (major, minor). Never pass
    ``API_VERSION``: it changes with the installed hwrl, so hwrl could not detect an old backend. hwrl refuses a plugin
    without ``api``. ``fallback`` marks a backend for any machine. Detection chooses it only if all backends loaded, all
    probes worked, and nothing hints at another device.
    """

    name: str
    device_type: str
    description: str
    api: tuple[int, int] | None = None
    fallback: bool = False


@dataclass(frozen=True)
class MemoryInfo:
    """Bytes on one device. ``free`` and ``total`` are device-wide; the others are of this process.

    ``allocated`` counts its tensors, ``reserved`` also the allocator's cache; ``peak`` is the most allocated so far.
    """

    free_nbytes: int
    total_nbytes: int
    allocated_nbytes: int
    reserved_nbytes: int
    peak_nbytes: int


class StreamLike(Protocol):
    """The part of ``torch.Stream`` used by hwrl."""

    def synchronize(self) -> None:
        """Block the host until all queued work is done."""

    def wait_event(self, event: Any) -> None:
        """Make later work on this stream wait for ``event``; does not block the host."""

    def wait_stream(self, stream: Any) -> None:
        """Make later work on this stream wait for the current work of ``stream``; does not block the host."""

    def record_event(self, event: Any = None) -> Any:
        """Mark this point of the stream in ``event`` (a new one if None) and return it."""

    def query(self) -> bool:
        """Return whether all queued work is done."""
        raise NotImplementedError

    def __enter__(self) -> Any: ...
    def __exit__(self, *exc: Any) -> Any: ...


_UNSUPPORTED = {
    Capability.SHARED_DEVICE_GROUPS: "most collective libraries need a device of its own for each rank",
    Capability.DEVICE_IPC: "the backend does not implement it",
    Capability.COMM_ABORT: "the backend does not implement it",
    Capability.REGISTERED_MEMORY: "the backend does not implement it",
    Capability.VARLEN_ATTENTION: "no fused kernel: sequences are padded to the longest",
    Capability.COMPILED_TRAINING: "torch's compiler is not proven on this device",
}


class Backend:
    """One kind of device, in this process.

    It works for any device with a torch device module; a subclass overrides only the differences. Methods act on the
    calling thread's current device, and any thread may call them. If a device lacks a feature, the method raises
    :class:`~hwrl.errors.UnsupportedError`; it never does nothing instead.
    """

    devices: DeviceMap = DeviceMap()
    _grouped_attention = False
    """Whether torch's fused attention on this device takes fewer key heads than query heads. If not, we repeat the key
    heads: otherwise torch would compute without the fused kernel, and store all scores."""

    def __init__(self, info: BackendInfo) -> None:
        self.info = info
        self._padded_attention = PaddedAttention(grouped=self._grouped_attention)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.info.name!r} on {self.info.device_type!r}>"

    # -- capabilities -------------------------------------------------------------------------------------------

    def supports(self, capability: Capability) -> Support:
        """Return whether this backend has ``capability``, with the reason."""
        if capability is Capability.COLLECTIVES:
            return self._collectives()
        if capability is Capability.COMM_ABORT and not self.supports(Capability.COLLECTIVES).usable:
            return Support("unverified", "groups staged through the host end with their connections")
        if (reason := _UNSUPPORTED.get(capability)) is not None:
            return Support("unsupported", reason)
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
                fix="choose another backend, or turn off the feature that needs it",
            )

    # -- device and streams -------------------------------------------------------------------------------------

    @functools.cached_property
    def device_module(self) -> Any:
        """torch's module for this device, for calls not covered by hwrl."""
        return torchapi.device_module(self.info.device_type)

    def device(self, index: int | None = None) -> torch.device:
        """Return device ``index``, or the current device of this thread."""
        import torch

        return torch.device(self.info.device_type, self.current_index() if index is None else index)

    def device_count(self) -> int:
        """Return the number of devices visible to this process; 0 is an answer, not an error."""
        return int(torchapi.function(self.info.device_type, "device_count", instead="device_count")())

    def why_no_device(self) -> str:
        """Return the reason why :meth:`device_count` is 0; an empty text if this process sees a device."""
        if self.device_count():
            return ""
        variable = self.devices.visible_variable
        try:
            visible = self.devices.visible(os.environ)
        except ConfigError as error:
            return f"{error.what}: {error.why}; {error.fix}"
        if visible == ():
            return f"{variable}={os.environ[str(variable)]!r} hides every device from this process"
        shown = f"{variable}={os.environ[variable]!r}" if variable and variable in os.environ else "nothing hides them"
        return (
            f"this process sees no device: the driver shows none ({shown}); install the driver's library, in a "
            f"container too, or name devices that exist"
        )

    def current_index(self) -> int:
        """Return the index of this thread's current device."""
        return int(torchapi.function(self.info.device_type, "current_device", instead="current_device_index")())

    def set_device(self, index: int) -> None:
        """Make device ``index`` this thread's current device. With some libraries this creates the device's context."""
        torchapi.function(self.info.device_type, "set_device", instead="set_device_index")(index)

    def device_uuid(self, index: int) -> str | None:
        """Return the UUID of device ``index``, equal in every process and under every number; None if unknown."""
        properties = getattr(self.device_module, "get_device_properties", None)
        uuid = "" if properties is None else str(getattr(properties(index), "uuid", None) or "")
        return uuid if uuid.strip("0-") else None

    def synchronize(self) -> None:
        """Block until all work queued on the current device is done."""
        torchapi.function(self.info.device_type, "synchronize", general="synchronize")()

    def stream(self) -> StreamLike:
        """Return a new side stream of the current device. Without streams, work on it runs at once, in the caller.

        This method, :meth:`current_stream` and :meth:`event` raise UnsupportedError if torch has no streams for the
        device: its backend must then override all three.
        """
        torchapi.require_streams(self.info.device_type)
        made: StreamLike = torchapi.new_stream(self.device())
        return made

    def current_stream(self) -> StreamLike:
        """Return this thread's current stream."""
        import torch

        torchapi.require_streams(self.info.device_type)
        return torch.accelerator.current_stream()

    def event(self, *, timing: bool = False) -> Any:
        """Return a ``torch.Event``; with ``timing`` it can measure ``elapsed_time`` in milliseconds."""
        torchapi.require_streams(self.info.device_type)
        return torchapi.new_event(self.info.device_type, timing=timing)

    def range(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Return a context manager; it marks a named range in the profiler's timeline."""
        import torch

        return torch.profiler.record_function(name)

    # -- compute ------------------------------------------------------------------------------------------------

    def varlen_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_length: int,
        scale: float | None = None,
    ) -> torch.Tensor:
        """Return causal self-attention within each of the packed sequences: (tokens, heads, head_dim).

        ``query`` is (tokens, heads, head_dim); ``key`` and ``value`` are (tokens, kv_heads, head_dim), and kv_heads
        divides heads. All have one dtype, or autocast gives them one. ``cu_seqlens`` (int32, sequences + 1, on the
        device) has the boundaries in ascending order, from 0 to the number of tokens. Two equal boundaries are an empty
        sequence. ``max_length`` is at least the longest sequence. ``scale`` multiplies the scores, by default head_dim
        ** -0.5. The backend may cache results for ``cu_seqlens``, so never write to it later. Differentiable;
        torch.compile can trace it. It does not wait for the device, except that a kernel may need the boundaries on the
        host: then it waits once for each new ``cu_seqlens``.
        """
        return self._padded_attention(query, key, value, cu_seqlens=cu_seqlens, max_length=max_length, scale=scale)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        """Return the most FLOP/s of dense matrix products in ``dtype`` on the current device; None if unknown.

        The number is the vendor's, for exactly this device model. In float32 it is for inputs of full precision.
        """
        return None

    # -- memory -------------------------------------------------------------------------------------------------

    def memory_info(self) -> MemoryInfo:
        """Return the used and free memory of the current device."""
        free, total = torchapi.function(self.info.device_type, "mem_get_info", general="get_memory_info")()
        # One call: torch's functions for single numbers each compute all statistics.
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
        """Raise :class:`~hwrl.errors.DeviceMemoryError`, with the memory's numbers, if torch runs out of it in the
        block.

        ``what`` names the content of the memory. It is the subject of the message: "``what`` does not fit".
        """
        import torch

        try:
            yield
        except torch.OutOfMemoryError as exc:
            said = str(exc).strip().partition("\n")[0] or "nothing"
            raise DeviceMemoryError(
                f"{what} does not fit in the memory of {self.device()}",
                why=f"{self._numbers()}; torch said: {said}",
                fix="use smaller micro-batches, offload more, or use more devices",
            ) from exc

    def _numbers(self) -> str:
        """Return :meth:`memory_info` in words, or the reason why it is not available."""
        try:
            info = self.memory_info()
        except UnsupportedError as error:
            return f"its free memory is not known: {error.why}"
        return (
            f"{_gib(info.free_nbytes)} of its {_gib(info.total_nbytes)} are free; tensors of this process hold "
            f"{_gib(info.allocated_nbytes)} (at most {_gib(info.peak_nbytes)}), and {_gib(info.reserved_nbytes)} with "
            f"the allocator's cache"
        )

    def empty_cache(self) -> None:
        """Give unused cached device memory back to the device."""
        torchapi.function(self.info.device_type, "empty_cache", general="empty_cache")()

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        """Return ``nbytes`` of uninitialised page-locked host memory, a 1-d uint8 tensor; the caller owns it.

        Raises UnsupportedError if torch cannot lock memory for the device.
        """
        self.require(Capability.PINNED_MEMORY, needed_for="allocate page-locked host memory")
        memory: torch.Tensor = torchapi.pinned_empty(self.info.device_type, nbytes)
        return memory

    def export_memory(self, memory: torch.Tensor) -> Handle:
        """Return a JSON-able handle of ``memory``, for :meth:`open_memory` in other processes of this host.

        ``memory`` is contiguous, not empty and on this backend's device; it may be a part of a larger storage. The
        caller keeps it: any number of processes can open the handle while this process keeps the storage alive. The
        processes must synchronise: wait for the device before you tell a reader about new data, and wait for the
        readers' answers before you free the storage or write again. Raises UnsupportedError if the backend, or the
        allocator behind ``memory``, does not support it, and CommError for an unsuitable tensor.
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
        """Return the memory behind another process's ``handle``: its bytes, as a 1-d uint8 tensor.

        If this process's current device reads the exporter's memory directly, the tensor is on the current device, and
        copies from it run there; otherwise it is on the exporter's device, under this process's number for it. The
        memory stays mapped until the last tensor over it is gone. Raises UnsupportedError in the exporting process
        itself. Raises CommError if the handle is damaged, stale or from another host, or if its device is not visible
        here.
        """
        self.require(Capability.DEVICE_IPC, needed_for="open another process's device memory")
        fields = unseal(handle)
        try:
            return self._open_memory(fields)
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise CommError(
                "cannot open another process's memory",
                why=f"its handle is malformed: {type(exc).__name__}: {exc}",
                fix="use the same hwrl in both processes",
            ) from exc

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        """Return the fields for :meth:`_open_memory`; backends with ``device_ipc`` implement both."""
        raise NotImplementedError(f"{self!r} claims device_ipc, but does not implement it")

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        """Return the memory of ``handle``; it is unchanged and from another process.

        May raise KeyError, TypeError, ValueError or OverflowError if it is malformed.
        """
        raise NotImplementedError(f"{self!r} claims device_ipc, but does not implement it")

    def register_host_memory(self, memory: torch.Tensor) -> None:
        """Page-lock ``memory`` (1-d uint8, on the host) in place; the caller owns it.

        Blocks: gigabytes take seconds. Call :meth:`unregister_host_memory` before you free the memory.
        """
        self.require(Capability.REGISTERED_MEMORY, needed_for="page-lock host memory in place")

    def unregister_host_memory(self, memory: torch.Tensor) -> None:
        """Undo :meth:`register_host_memory`; no copy from or to ``memory`` may be in progress."""
        self.require(Capability.REGISTERED_MEMORY, needed_for="release page-locked host memory")

    # -- random numbers -----------------------------------------------------------------------------------------

    def rng_state(self) -> torch.Tensor:
        """Return the state of the current device's default generator, a uint8 tensor on the host."""
        state: torch.Tensor = torchapi.function(self.info.device_type, "get_rng_state")()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        """Restore a state from :meth:`rng_state`."""
        torchapi.function(self.info.device_type, "set_rng_state")(state)

    def seed(self, value: int) -> None:
        """Seed the current device's default generator: equal values give equal random numbers afterwards."""
        torchapi.function(self.info.device_type, "manual_seed")(value)

    # -- collectives, for :mod:`hwrl.comm` ----------------------------------------------------------------------

    def comm_library(self) -> str:
        """Return torch.distributed's name for this device's collective library.

        Raises UnsupportedError if there is none.
        """
        import torch.distributed as dist

        try:
            return str(dist.get_default_backend_for_device(self.info.device_type))
        except (ValueError, RuntimeError, AttributeError) as exc:  # RuntimeError: torch does not know the device's name
            raise UnsupportedError(
                "cannot form a process group",
                why=f"torch knows no collective library for device {self.info.device_type!r}: {exc}",
                fix="import it in hwrl_create_backend; without one, hwrl.comm stages groups through the host",
            ) from exc

    def group_library(self) -> str:
        """Return torch.distributed's name of the library for torch's default group and its subgroups.

        By default it is :meth:`comm_library`. Override it if the backend registers a library of its own for them.
        """
        return self.comm_library()

    def library_timeout(self, timeout_s: float) -> timedelta:
        """Return ``timeout_s`` for torch.distributed. Override it if the library misreads some values."""
        return timedelta(seconds=timeout_s)

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        """Return a new process group over ``store``, independent of torch's default group.

        All ``size`` ranks must call it with the same ``store`` contents and ``name``. Blocks until the library's
        rendezvous, if any, is done.
        """
        from torch.distributed import distributed_c10d as c10d

        # Only this private helper serves built-in and third-party libraries alike without touching the default group.
        # Its annotations differ by version. Replace it when torch has a public function.
        helper: Any = c10d._new_process_group_helper
        group: ProcessGroup = helper(size, rank, [], self.comm_library(), store, group_name=name, timeout=timeout)[0]
        c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}  # needed by destroy
        return group

    def await_work(self, work: Any) -> None:
        """Make this thread's current stream wait for ``work``, the result of a group's operation.

        Blocks only on a device without streams, until the work is done. May raise the library's error.
        """
        work.wait()

    def abort_process_group(self, group: ProcessGroup) -> None:
        """End every collective of ``group`` that blocks in another thread; the group is unusable afterwards."""
        self.require(Capability.COMM_ABORT, needed_for="abort a process group")
        group.abort()


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.2f} GiB"
