"""hwrl on Ascend NPUs, through torch_npu and HCCL; tested with a simulated CANN, not on a device (docs/npu.md)."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.errors import BackendUnavailableError
from hwrl.interfaces import (
    Backend,
    BackendInfo,
    Capability,
    Finding,
    Handle,
    Kernels,
    MemoryInfo,
    ProbeContext,
    ProbeResult,
    RolloutSettings,
    Support,
    without_device_files,
)
from hwrl_npu import settings

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from hwrl.comm import Store
    from hwrl_npu.attention import FusedAttention

INFO = BackendInfo(
    name="npu", device_type="npu", description="Ascend NPUs, HCCL collectives (not run on a device yet)", api=(1, 0)
)
_DEVICE_FILES = "dev/davinci[0-9]*"
_GPU_FILES = "dev/nvidia[0-9]*"
_PCI_VENDOR, _PCI_ACCELERATOR = 0x19E5, 0x12  # Huawei; its screen controllers have another class
_ZIP_ENGINES = (0xA250, 0xA251)  # compression in Kunpeng processors, in the same class
_READ_AS_DEFAULT_S = 1800  # torch_npu reads this timeout as "not given", and waits for an hour instead
_SIMULATED = Support(
    "unverified", "passes the conformance kit over a simulated CANN (torch_npu 2.13); not run on a device"
)
_SUPPORT = {
    Capability.STREAMS: _SIMULATED,
    Capability.PINNED_MEMORY: _SIMULATED,
    Capability.MEMORY_STATS: _SIMULATED,
    Capability.COLLECTIVES: _SIMULATED,
    Capability.REDUCE_AVERAGE: _SIMULATED,
    Capability.COMM_ABORT: _SIMULATED,
    Capability.DEVICE_IPC: _SIMULATED,
    Capability.VARLEN_ATTENTION: _SIMULATED,
    Capability.COMPILED_TRAINING: Support("unsupported", "torch's compiler is not proven with torch_npu"),
    Capability.REGISTERED_MEMORY: Support("unsupported", "torch_npu has no call for it"),
    Capability.SHARED_DEVICE_GROUPS: Support("unsupported", "HCCL needs a device of its own for each rank"),
}


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    files = context.device_files(_DEVICE_FILES)
    if not files:
        return without_device_files(
            context,
            pattern=_DEVICE_FILES,
            vendor=_PCI_VENDOR,
            base_class=_PCI_ACCELERATOR,
            ignored=_ZIP_ENGINES,
            device="Ascend NPU",
            fix="install and load the NPU driver (npu-smi info), or start the container with its NPUs "
            "(--device /dev/davinci0 and the others)",
        )
    missing = [name for name in ("torch", "torch_npu") if not context.has_module(name)]
    if missing:
        return ProbeResult("no", f"{' and '.join(missing)} not installed", files)
    gpus = context.device_files(_GPU_FILES)
    if gpus and re.search(r"^cuda\b[^=\n]*=\s*'", context.module_text("torch", "version.py") or "", re.MULTILINE):
        reason = f"torch is built for CUDA and has a GPU ({gpus[0]}); torch_npu refuses that: install the CPU build"
        return ProbeResult("no", reason, files)
    return ProbeResult("yes", f"{len(files)} NPU device files, and torch_npu is installed", files, rank=100)


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    try:
        import torch_npu  # noqa: F401 - registers the device with torch
    except Exception as exc:  # ImportError, OSError or RuntimeError: it depends on the missing part of CANN
        raise BackendUnavailableError(
            "backend 'npu' cannot be created",
            why=f"import torch_npu raised {type(exc).__name__}: {exc}",
            fix="source CANN's set_env.sh in this shell, and install the torch_npu that matches torch's version",
        ) from exc
    return NpuBackend(INFO)


@hwrl.hookimpl
def hwrl_process_env(role: str, env: Mapping[str, str], exports_memory: bool, shares_device: bool) -> dict[str, str]:
    return settings.worker(role, env, exports_memory=exports_memory, shares_device=shares_device)


@hwrl.hookimpl
def hwrl_bootstrap(framework: str) -> None:
    if framework == "megatron":
        from hwrl_npu import adaptor

        adaptor.prepare()


@hwrl.hookimpl
def hwrl_engine_args(
    framework: str, settings: RolloutSettings | None, options: Mapping[str, Any]
) -> dict[str, Any] | None:
    if framework != "vllm":
        return None
    from hwrl_npu import vllm_traps

    return vllm_traps.arguments(settings, options, os.environ)


@hwrl.hookimpl
def hwrl_kernels() -> Kernels | None:
    from hwrl_npu import kernels

    return Kernels(rms_norm=kernels.rms_norm, swiglu=kernels.swiglu)


@hwrl.hookimpl
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    from hwrl_npu import vllm_traps

    devices = len(context.device_files(_DEVICE_FILES))
    return [*settings.findings(context, devices=devices), *(vllm_traps.findings(context) if devices else ())]


class NpuBackend(Backend):
    """torch_npu's device by torch's generic functions, with its own device map, attention, IPC and process groups."""

    devices = settings.DEVICES

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.DEVICE_IPC and settings.uses_expandable_segments(os.environ):
            return Support(
                "unsupported",
                f"expandable segments, whose memory was not proven to be shareable, are on: unset "
                f"{' and '.join(settings.ALLOCATOR)}, or write expandable_segments:False",
            )
        return _SUPPORT.get(capability) or super().supports(capability)

    @functools.cached_property
    def _fused_attention(self) -> FusedAttention:
        from hwrl_npu.attention import FusedAttention

        return FusedAttention()

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
        from hwrl_npu import attention

        query, key, value = attention.cast(query, key, value)
        if attention.takes(query, value, len(cu_seqlens) - 1):
            return self._fused_attention(query, key, value, cu_seqlens=cu_seqlens, scale=scale)
        return super().varlen_attention(query, key, value, cu_seqlens=cu_seqlens, max_length=max_length, scale=scale)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        import torch

        from hwrl_npu import peaks

        short = dtype in (torch.bfloat16, torch.float16)  # CANN does not describe the cube's float32
        return peaks.of(self.device_module.get_device_name(), os.environ) if short else None

    def set_device(self, index: int) -> None:
        super().set_device(index)
        # torch_npu 2.13 makes a device's default stream at its first use. A backward pass with a device that was set
        # but never used ends the process.
        self.device_module.current_stream()

    def memory_info(self) -> MemoryInfo:
        self.device_module.current_stream()  # torch_npu's mem_get_info needs a device to be set, and sets none
        return super().memory_info()

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        from hwrl_npu import ipc

        return ipc.export(memory, devices=self.devices)

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        from hwrl_npu import ipc

        return ipc.open(handle, devices=self.devices)

    def library_timeout(self, timeout_s: float) -> timedelta:
        return super().library_timeout(timeout_s + (timeout_s == _READ_AS_DEFAULT_S))

    def create_process_group(
        self, store: Store, *, rank: int, size: int, name: str, timeout: timedelta
    ) -> ProcessGroup:
        from hwrl_npu import hccl

        group: ProcessGroup = hccl.create(store, rank=rank, size=size, name=name, timeout=timeout, device=self.device())
        return group

    def await_work(self, work: Any) -> None:
        work.get_future().wait()  # without a watchdog, the work's own wait() would block the host

    def abort_process_group(self, group: ProcessGroup) -> None:
        from hwrl_npu import hccl

        hccl.abort(group)
