"""Backends of devices that have not been run on: their probes on imitated machines, and the parts that need no device.

Several vendors' torch builds call their device "cuda", so the probes must tell the vendors apart.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl_rocm
import hwrl_xpu
from hwrl.discovery import Registry
from hwrl.errors import BackendAmbiguousError, ConfigError, UnsupportedError
from hwrl.interfaces import Backend, Capability, ProbeContext
from hwrl.testing import conformance
from tests.support.machines import CUDA_TORCH, HOST_TORCH, ROCM_TORCH, XPU_TORCH, Machine, machine

__all__ = ["machine"]  # a fixture

POINTS = [EntryPoint(name, f"hwrl_{name}", "hwrl.backends") for name in ("cpu", "cuda", "npu", "rocm", "xpu")]
ROCM, XPU = hwrl_rocm.RocmBackend(hwrl_rocm.INFO), hwrl_xpu.XpuBackend(hwrl_xpu.INFO)
SLOT = "0000:17:00.0"

Build = Callable[[Machine], Machine]


def amd(machine: Machine) -> Machine:
    return machine.with_devices("kfd", "dri/renderD128").with_pci(SLOT, vendor="0x1002", kind="0x120000")


def intel(machine: Machine) -> Machine:
    return machine.with_devices("dri/renderD128").with_pci("0000:3a:00.0", vendor="0x8086", kind="0x038000")


def nvidia(machine: Machine) -> Machine:
    return machine.with_devices("nvidia0").with_pci("0000:ca:00.0", vendor="0x10de", kind="0x030200")


def hygon(machine: Machine) -> Machine:
    return machine.with_devices("kfd", "mkfd").with_pci(SLOT, vendor="0x1d94", kind="0x120000")


def metax(machine: Machine) -> Machine:
    return machine.with_devices("mxcd").with_pci(SLOT, vendor="0x9999", kind="0x030200")


CHOSEN: dict[str, tuple[list[Build], str, str]] = {
    "AMD": ([amd], ROCM_TORCH, "rocm"),
    "Intel": ([intel], XPU_TORCH, "xpu"),
    "NVIDIA": ([nvidia], CUDA_TORCH, "cuda"),
    "NVIDIA and AMD, torch for NVIDIA": ([nvidia, amd], CUDA_TORCH, "cuda"),
    "NVIDIA and AMD, torch for AMD": ([nvidia, amd], ROCM_TORCH, "rocm"),
    "AMD GPU in a server with an Intel GPU": ([intel, amd], ROCM_TORCH, "rocm"),
}
REFUSED: dict[str, tuple[list[Build], str, str]] = {
    "AMD, torch for the host": ([amd], HOST_TORCH, "rocm says no: torch is not built for ROCm"),
    "AMD, torch for NVIDIA": ([amd], CUDA_TORCH, "rocm says no: torch is not built for ROCm"),
    "AMD without a device file": (
        [lambda machine: machine.with_pci(SLOT, vendor="0x1002", kind="0x120000")],
        ROCM_TORCH,
        "rocm says no: there is no /dev/kfd: load the driver (modprobe amdgpu), or start the container with",
    ),
    "torch for AMD, no device": ([], ROCM_TORCH, "rocm says no: this machine or container shows no AMD GPU"),
    "Hygon with a torch that says hip": ([hygon], ROCM_TORCH, "rocm says no: this machine shows a Hygon DCU"),
    "MetaX with a torch that says cuda": ([metax], CUDA_TORCH, "shows MetaX GPU"),
    "Intel, torch for the host": ([intel], HOST_TORCH, "xpu says no: torch is not built for XPU"),
    "Intel without a device file": (
        [lambda machine: machine.with_pci(SLOT, vendor="0x8086", kind="0x038000")],
        XPU_TORCH,
        "xpu says no: there is no /dev/dri/renderD*: load the driver (modprobe xe)",
    ),
    "a processor's own graphics, torch for Intel": (
        [
            lambda machine: machine.with_devices("dri/renderD128").with_pci(
                "0000:00:02.0", vendor="0x8086", kind="0x030000"
            )
        ],
        XPU_TORCH,
        "xpu says unknown: the GPU may be a processor's own; set HWRL_BACKEND to decide",
    ),
}


def choose(machine: Machine, **env: str) -> str:
    registry = Registry(env=env, context=machine.context(**env), entry_points=POINTS)
    return registry.choose().plugin.info.name


@pytest.mark.parametrize("case", CHOSEN)
def test_the_backend_of_the_vendor_for_which_torch_is_built_is_chosen(machine: Machine, case: str) -> None:
    parts, torch_text, name = CHOSEN[case]
    for part in parts:
        part(machine)
    assert choose(machine.with_module("torch", torch_text)) == name


@pytest.mark.parametrize("case", REFUSED)
def test_a_device_that_cannot_be_used_stops_detection_with_the_reason(machine: Machine, case: str) -> None:
    parts, torch_text, said = REFUSED[case]
    for part in parts:
        part(machine)
    machine.with_module("torch", torch_text)
    with pytest.raises(BackendAmbiguousError, match="will not fall back to 'cpu'") as caught:
        choose(machine)
    assert said in caught.value.why
    assert choose(machine, HWRL_BACKEND="cpu") == "cpu"


def test_a_processors_own_graphics_are_used_if_the_user_says_so(machine: Machine) -> None:
    machine.with_devices("dri/renderD128").with_module("torch", XPU_TORCH)
    assert choose(machine, HWRL_BACKEND="xpu") == "xpu"


@pytest.mark.parametrize("plugin", [hwrl_rocm, hwrl_xpu])
def test_the_probe_denies_an_empty_machine(plugin: Any, tmp_path: Path) -> None:
    result = plugin.hwrl_probe(context=ProbeContext(env={}, find_spec=lambda name: None, root=tmp_path))
    assert (result.answer, result.evidence) == ("no", ())


@pytest.fixture(params=[ROCM, XPU], ids=repr)
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.param
    return found


class TestDeviceMap(conformance.DeviceMapContract): ...


class TestCapability(conformance.CapabilityContract):
    @pytest.fixture(autouse=True)
    def _on_the_host(self, backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(backend, "device", lambda index=None: torch.device("cpu"))


@pytest.mark.parametrize("capability", Capability)
def test_nothing_is_said_to_be_proven(backend: Backend, capability: Capability) -> None:
    support = backend.supports(capability)
    assert support.state in ("unsupported", "unverified") and support.reason
    assert backend.info.description.endswith("(not run on a device yet)")


def test_memory_is_not_shared_and_the_library_is_torchs(backend: Backend) -> None:
    with pytest.raises(UnsupportedError, match="device_ipc"):
        backend.export_memory(torch.ones(1))
    assert backend.comm_library() == {"rocm": "nccl", "xpu": "xccl"}[backend.info.name]
    assert backend.devices.ray_options(2) == {"num_gpus": 2}


def test_amd_gpus_are_listed_by_one_variable_only() -> None:
    devices = ROCM.devices
    assert devices.visible({"HIP_VISIBLE_DEVICES": "-1"}) == ()
    assert devices.narrow([1], {"HIP_VISIBLE_DEVICES": "GPU-a, GPU-b"}) == {"HIP_VISIBLE_DEVICES": "GPU-b"}
    assert devices.narrow([1], {"HIP_VISIBLE_DEVICES": "4,6"}) == {"HIP_VISIBLE_DEVICES": "6"}
    for name in ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        with pytest.raises(ConfigError, match=r"unset it, and set HIP_VISIBLE_DEVICES=1,2"):
            devices.visible({name: "1,2"})
    assert devices.visible({"CUDA_VISIBLE_DEVICES": "1,2", "HIP_VISIBLE_DEVICES": "1,2"}) == (1, 2)


def test_packs_on_amd_gpus_take_torchs_own_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr(Backend, "varlen_attention", lambda self, *tensors, **options: called.append(self))
    packed = torch.ones(3, 2, 8)
    ROCM.varlen_attention(packed, packed, packed, cu_seqlens=torch.tensor([0, 3]), max_length=3)
    assert called == [ROCM]
    assert ROCM.peak_flops(torch.bfloat16) is None


def test_torch_has_every_function_for_intel_gpus_that_the_generic_backend_calls() -> None:
    called = "device_count current_device set_device synchronize get_rng_state set_rng_state manual_seed empty_cache"
    for name in (*called.split(), "manual_seed_all", "mem_get_info", "memory_stats", "get_device_properties"):
        assert callable(getattr(torch.xpu, name)), name
    for name in ("Stream", "Event", "stream", "current_stream"):
        assert hasattr(torch.xpu, name), name
