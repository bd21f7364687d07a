"""The CPU as several numbered devices. As on most devices, no two processes of one device can form a group.

Ray does not know them. NUMBERED_MAP chooses the backend's map: "variable" narrows devices by a variable, "index" has no
variable, and "deaf" names a variable without a reader. NUMBERED_STUCK: set_device has no effect.
"""

from __future__ import annotations

import os
import threading
from typing import Any

import torch

import hwrl
from hwrl.errors import CommError, UnsupportedError
from hwrl.interfaces import Backend, BackendInfo, Capability, DeviceMap, Handle, ProbeContext, ProbeResult, Support
from hwrl_cpu import CpuBackend

INFO = BackendInfo(name="numbered", device_type="cpu", description="the CPU as NUMBERED_DEVICES devices", api=(1, 0))
VARIABLE = "NUMBERED_VISIBLE"
MAP = os.environ.get("NUMBERED_MAP", "variable")


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
def hwrl_process_env(role: str, exports_memory: bool, devices: tuple[int, ...]) -> dict[str, str]:
    given = {"NUMBERED_GIVEN": ",".join(map(str, devices))}
    return given | ({} if exports_memory or role != "trainer" else {"NUMBERED_NO_EXPORT": "1"})


class NumberedBackend(CpuBackend):
    devices = DeviceMap(visible_variable=None if MAP == "index" else VARIABLE, ray_resource="NUMBERED")

    def __init__(self, info: BackendInfo) -> None:
        super().__init__(info)
        self._current = threading.local()  # as on most devices, each thread begins with device 0

    def supports(self, capability: Capability) -> Support:
        if capability is Capability.SHARED_DEVICE_GROUPS:
            return Support("unsupported", "each rank wants a device")
        if capability is Capability.COLLECTIVES and "NUMBERED_MUTE" in os.environ:
            return Support("unsupported", "nobody wrote the library")
        return super().supports(capability)

    def device_count(self) -> int:
        visible = self.devices.visible(os.environ)
        return int(os.environ["NUMBERED_DEVICES"]) if visible is None or MAP == "deaf" else len(visible)

    def current_index(self) -> int:
        return int(getattr(self._current, "index", 0))

    def set_device(self, index: int) -> None:
        assert 0 <= index < self.device_count()
        self._current.index = 0 if "NUMBERED_STUCK" in os.environ else index

    def memory_info(self) -> Any:
        """Return the CPU's. A thread must compute on the device given to its process."""
        here = self.devices.to_physical(self.current_index(), os.environ)
        assert os.environ.get("NUMBERED_GIVEN", str(here)) == str(here) or "NUMBERED_STUCK" in os.environ
        return super().memory_info()

    def _export_memory(self, memory: torch.Tensor) -> Handle:
        if "NUMBERED_NO_EXPORT" in os.environ:
            raise UnsupportedError("cannot export", why="NUMBERED_NO_EXPORT is set", fix="unset it")
        here = self.devices.to_physical(self.current_index(), os.environ)
        return super()._export_memory(memory) | {"device": here}

    def _open_memory(self, handle: Handle) -> torch.Tensor:
        own = self.devices.visible(os.environ)
        if own is not None and handle["device"] not in own:
            raise CommError("cannot open", why=f"{handle['device']} is none of {own}", fix="see more devices")
        return super()._open_memory(handle)
