"""The CPU as several numbered devices on which, as on most, no two processes of a device can form a group."""

from __future__ import annotations

import os
from typing import Any

import torch

import hwrl
from hwrl.backend import Backend, BackendInfo, Capability, DeviceMap, ProbeContext, ProbeResult, Support
from hwrl.errors import CommError, UnsupportedError
from hwrl.handles import Handle
from hwrl_cpu import CpuBackend

INFO = BackendInfo(name="numbered", device_type="cpu", description="the CPU as NUMBERED_DEVICES devices", api=(1, 0))


@hwrl.hookimpl
def hwrl_backend_info() -> BackendInfo:
    return INFO


@hwrl.hookimpl
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    return ProbeResult("yes", "it always runs")


@hwrl.hookimpl
def hwrl_create_backend() -> Backend:
    return NumberedBackend(INFO)


@hwrl.hookimpl
def hwrl_process_env(role: str, exports_memory: bool) -> dict[str, str]:
    return {} if exports_memory or role != "trainer" else {"NUMBERED_NO_EXPORT": "1"}


class NumberedDeviceMap(DeviceMap):
    def ray_options(self, count: float) -> dict[str, Any]:
        return {"num_gpus": count}


class NumberedBackend(CpuBackend):
    # Ray knows this resource and this variable, so that it numbers the devices as it does real ones.
    devices = NumberedDeviceMap(visible_variable="CUDA_VISIBLE_DEVICES", ray_resource="GPU")

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.SHARED_DEVICE_GROUPS:
            return Support("unsupported", "each rank wants a device")
        return super().supports(capability)

    def device_count(self) -> int:
        visible = self.devices.visible(os.environ)
        return int(os.environ["NUMBERED_DEVICES"]) if visible is None else len(visible)

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        if "NUMBERED_NO_EXPORT" in os.environ:
            raise UnsupportedError("cannot export", why="NUMBERED_NO_EXPORT is set", fix="unset it")
        return super()._export_memory(memory) | {"device": self.devices.to_physical(0, os.environ)}

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        own = self.devices.visible(os.environ) or ()
        if handle["device"] not in own:
            raise CommError("cannot open", why=f"{handle['device']} is none of {own}", fix="see more devices")
        return super()._open_memory(handle)
