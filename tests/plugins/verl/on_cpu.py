"""What verl lacks on a host without devices; its run there is a rehearsal of the run on devices.

``VERL_USE_EXTERNAL_MODULES=tests.plugins.verl.on_cpu`` applies it in each of verl's processes; it imports hwrl's parts.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import hwrl_cpu
import hwrl_cuda

sys.modules.setdefault("megatron", None)  # type: ignore[arg-type] # not installed, then: its import takes as long

import hwrl_verl.platform  # noqa: E402, F401 - it registers itself

# Ray shall count the CPU as a GPU: verl counts no other resource, and asks Ray for the index of a process's device.
hwrl_cpu.CpuBackend.devices = hwrl_cuda.CudaDeviceMap(ray_resource="GPU")


def _init_process_group(backend: str | None = None, **options: Any) -> None:
    """Make the default group; verl names the library of the CPU twice if the CPU is the device."""
    names = dict.fromkeys((backend or "").split(","))
    _torchs_init_process_group(backend=",".join(names) or None, **options)


_torchs_init_process_group = torch.distributed.init_process_group
torch.distributed.init_process_group = _init_process_group  # type: ignore[assignment] # verl passes names only
