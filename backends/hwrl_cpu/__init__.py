"""The reference backend: hwrl on the CPU. ``hwrl new-backend`` starts a new one.

"Device" memory is the C heap, the memory of torch's CPU tensors; "pinned" memory is anonymous mmap. The two are
separate. So an offload to the host really frees device memory, and the contracts of all backends apply here, too.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from itertools import chain
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.interfaces import (
    Backend,
    BackendInfo,
    Capability,
    Handle,
    MemoryInfo,
    ProbeContext,
    ProbeResult,
    StreamlessBackend,
    Support,
)
from hwrl_cpu import heap, limits
from hwrl_cpu.accelerators import accelerator_signs

if TYPE_CHECKING:
    from datetime import timedelta

    import torch
    from torch.distributed import ProcessGroup

    from hwrl.comm import Store
    from hwrl_cpu.gloo import AbortableGroups

__all__ = ["CpuBackend", "accelerator_signs"]

INFO = BackendInfo(name="cpu", device_type="cpu", description="any CPU, Gloo collectives", api=(1, 0), fallback=True)

_SUPPORT = {
    Capability.STREAMS: Support("unsupported", "CPU work runs in the calling thread; streams are inline"),
    Capability.PINNED_MEMORY: Support("supported", "host memory is anonymous mmap, apart from the heap"),
    Capability.REGISTERED_MEMORY: Support("supported", "the processor copies, so no page must be locked"),
    Capability.MEMORY_STATS: Support("supported", "counted by the C library"),
    Capability.COLLECTIVES: Support("supported", "Gloo"),
    Capability.REDUCE_AVERAGE: Support("supported", "Gloo"),
    Capability.COMM_ABORT: Support("supported", "standalone groups: their sockets are shut down"),
    Capability.SHARED_DEVICE_GROUPS: Support("supported", "groups are of processes, not of devices"),
    Capability.DEVICE_IPC: Support("supported", "an exported tensor is moved into a shared memory file, in place"),
    Capability.VARLEN_ATTENTION: Support("unsupported", "no fused kernel: sequences are padded to the longest"),
    Capability.COMPILED_TRAINING: Support("unsupported", "for small models, compilation costs more than it saves"),
}


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    if not context.has_module("torch"):
        return ProbeResult("no", "torch is not installed")
    found = accelerator_signs(context)
    if not found:
        return ProbeResult("yes", "every machine has a CPU")
    return ProbeResult(
        "yes",
        f"every machine has a CPU, but this one shows {' and '.join(found)}, which the CPU "
        f"must not replace unasked: install a torch and a backend package for it (`hwrl new-backend` begins one)",
        tuple(chain.from_iterable(found.values())),
    )


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return CpuBackend(INFO)


@hwrl.hookimpl
def hwrl_engine_args(framework: str) -> dict[str, Any] | None:
    # With chunked prefill, vLLM rewinds the generator of a seeded request. torch's CPU generator cannot be rewound.
    return {"enable_chunked_prefill": False} if framework == "vllm" else None


class CpuBackend(StreamlessBackend):
    """The CPU: one device, without streams. Its memory is the process's heap; the peak is of the resident set."""

    _grouped_attention = True

    @functools.cached_property
    def _groups(self) -> AbortableGroups:
        from hwrl_cpu.gloo import AbortableGroups

        return AbortableGroups()

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.MEMORY_STATS and not heap.can_count():
            return Support("unsupported", "this C library has no mallinfo2")
        return _SUPPORT[capability]

    def device(self, index: int | None = None) -> torch.device:
        import torch

        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def current_index(self) -> int:
        return 0

    def set_device(self, index: int) -> None:
        if index != 0:
            raise hwrl.HwrlError(f"there is no CPU device {index}", why="all cores are device 0", fix="use device 0")

    def synchronize(self) -> None:
        """Return at once: CPU work is done when its call returns."""

    def memory_info(self) -> MemoryInfo:
        used, machine = heap.allocated_nbytes(), limits.usable_memory()
        return MemoryInfo(
            free_nbytes=machine.free_nbytes,
            total_nbytes=machine.total_nbytes,
            allocated_nbytes=used,
            reserved_nbytes=used,
            peak_nbytes=heap.peak_resident_nbytes(),
        )

    def empty_cache(self) -> None:
        ctypes.CDLL(None).malloc_trim(0)

    def pinned_empty(self, nbytes: int) -> torch.Tensor:
        import torch

        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        from hwrl_cpu import shared

        return shared.export(memory)

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        from hwrl_cpu import shared

        return shared.open(handle)

    def rng_state(self) -> torch.Tensor:
        import torch

        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor) -> None:
        import torch

        torch.set_rng_state(state)

    def seed(self, value: int) -> None:
        import torch

        torch.default_generator.manual_seed(value)

    def group_library(self) -> str:
        from hwrl_cpu import gloo

        return gloo.register()

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        return self._groups.create(store, rank=rank, size=size, timeout=timeout)

    def abort_process_group(self, group: ProcessGroup) -> None:
        self._groups.abort(group)
