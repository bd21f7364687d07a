"""hwrl on Intel GPUs, with a torch built for them: device "xpu", collectives XCCL. Not run on a device yet."""

from __future__ import annotations

from typing import Any

import hwrl
from hwrl.interfaces import Backend, BackendInfo, Capability, DeviceMap, ProbeContext, ProbeResult, Support
from hwrl_cpu import accelerator_signs

INFO = BackendInfo(
    name="xpu", device_type="xpu", description="Intel GPUs, XCCL collectives (not run on a device yet)", api=(1, 0)
)
_RENDER = "dev/dri/renderD*"
_IN_TORCH = Support("unverified", "torch's own functions for the device; not run on one")
_SUPPORT = {
    Capability.STREAMS: _IN_TORCH,
    Capability.PINNED_MEMORY: _IN_TORCH,
    Capability.MEMORY_STATS: _IN_TORCH,
    Capability.COLLECTIVES: _IN_TORCH,
    Capability.REDUCE_AVERAGE: Support("unsupported", "XCCL sums only"),
}


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    found = accelerator_signs(context)
    devices, built = tuple(found.get("Intel accelerator", ())), tuple(found.get("torch built for xpu", ()))
    files = context.device_files(_RENDER)
    if not devices and not (built and files):
        return ProbeResult("no", "this machine or container shows no Intel GPU", built)
    if not built:
        return ProbeResult("no", "torch is not built for XPU: install that build to use the Intel GPU", devices)
    if not files:
        fix = "load the driver (modprobe xe), or start the container with --device /dev/dri"
        return ProbeResult("no", f"there is no /{_RENDER}: {fix}", devices)
    if not devices:
        return ProbeResult("unknown", "the GPU may be a processor's own; set HWRL_BACKEND to decide", files)
    return ProbeResult("yes", f"/{_RENDER}, a GPU of Intel and a torch built for XPU", devices, rank=100)


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return XpuBackend(INFO)


class XpuDeviceMap(DeviceMap):
    """Intel GPUs by number."""

    def ray_options(self, count: float) -> dict[str, Any]:
        return {"num_gpus": count}


class XpuBackend(Backend):
    """torch's device for Intel GPUs by torch's generic functions."""

    devices = XpuDeviceMap(visible_variable="ZE_AFFINITY_MASK", ray_resource="GPU")

    def supports(self, capability: Capability) -> Support:
        return _SUPPORT.get(capability) or super().supports(capability)
