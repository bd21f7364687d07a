"""hwrl on AMD GPUs, with a torch built for ROCm: its device is "cuda", its "nccl" is RCCL. Not run on a device yet."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import hwrl
from hwrl.errors import ConfigError
from hwrl.interfaces import Backend, BackendInfo, Capability, Finding, ProbeContext, ProbeResult, Support
from hwrl_cpu import accelerator_signs
from hwrl_cuda import CudaBackend, CudaDeviceMap

if TYPE_CHECKING:
    import torch

INFO = BackendInfo(
    name="rocm", device_type="cuda", description="AMD GPUs, RCCL collectives (not run on a device yet)", api=(1, 0)
)
_KFD = "dev/kfd"
VISIBLE = "HIP_VISIBLE_DEVICES"
_OTHERS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")  # the runtime reads these lists, too
_AS_CUDA = Support("unverified", "the calls of backend 'cuda', which torch has for ROCm; not run on a device")
_SUPPORT = {
    Capability.STREAMS: _AS_CUDA,
    Capability.PINNED_MEMORY: _AS_CUDA,
    Capability.REGISTERED_MEMORY: _AS_CUDA,
    Capability.MEMORY_STATS: _AS_CUDA,
    Capability.COLLECTIVES: _AS_CUDA,
    Capability.REDUCE_AVERAGE: _AS_CUDA,
    Capability.COMM_ABORT: _AS_CUDA,
    Capability.DEVICE_IPC: Support("unsupported", "the driver's calls of backend 'cuda' are CUDA's own"),
}


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    found = accelerator_signs(context)
    devices, built = tuple(found.get("AMD GPU", ())), tuple(found.get("torch built for hip", ()))
    if other := found.get("Hygon DCU"):
        return ProbeResult("no", "this machine shows a Hygon DCU, whose torch has AMD's names, too", tuple(other))
    if not devices:
        return ProbeResult("no", "this machine or container shows no AMD GPU", built)
    if not built:
        return ProbeResult("no", "torch is not built for ROCm: install that build to use the AMD GPU", devices)
    if not context.device_files(_KFD):
        fix = "load the driver (modprobe amdgpu), or start the container with --device /dev/kfd --device /dev/dri"
        return ProbeResult("no", f"there is no /{_KFD}: {fix}", devices)
    return ProbeResult("yes", f"/{_KFD} and a torch built for ROCm", devices, rank=100)


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return RocmBackend(INFO)


@hwrl.hookimpl
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    for name in (VISIBLE, *_OTHERS, "NCCL_SOCKET_IFNAME"):
        if name in context.env:
            yield Finding("info", f"{name}={context.env[name]}")


class RocmDeviceMap(CudaDeviceMap):
    """AMD GPUs by number or UUID. A list in another variable is an error: hwrl would count the wrong devices."""

    def visible(self, env: Mapping[str, str]) -> tuple[int, ...] | None:
        for name in _OTHERS:
            if env.get(name) and env[name] != env.get(VISIBLE):
                raise ConfigError(
                    f"{name}={env[name]!r} hides AMD GPUs from hwrl",
                    why=f"hwrl counts the devices of {VISIBLE}, and the runtime reads both",
                    fix=f"unset it, and set {VISIBLE}={env[name]}",
                )
        return super().visible(env)


class RocmBackend(CudaBackend):
    """torch's device for ROCm by the calls of CUDA's backend, without its IPC, its fused attention and its kernels."""

    devices = RocmDeviceMap(visible_variable=VISIBLE, ray_resource="GPU")

    def supports(self, capability: Capability) -> Support:
        return _SUPPORT.get(capability) or Backend.supports(self, capability)

    def varlen_attention(self, *tensors: torch.Tensor, **options: Any) -> torch.Tensor:
        return Backend.varlen_attention(self, *tensors, **options)

    def peak_flops(self, dtype: torch.dtype) -> float | None:
        return None
