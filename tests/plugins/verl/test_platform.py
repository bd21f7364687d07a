"""verl's platform over backends of hwrl; verl's own workers run on it in the other tests."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.distributed as dist

import hwrl_cpu
import hwrl_cuda
import hwrl_npu
from hwrl.comm import HashStore
from hwrl.interfaces import Backend
from tests.plugins.verl import actors
from tests.support.numbered import INFO, NumberedBackend

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: make test-stack-verl"),
    pytest.mark.filterwarnings("default"),  # verl's own
]


def platform_of(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> actors.HwrlPlatform:
    platform = actors.HwrlPlatform()
    monkeypatch.setitem(vars(platform), "_backend", backend)
    return platform


def test_the_cpu_has_all_that_verl_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = platform_of(hwrl_cpu.CpuBackend(hwrl_cpu.INFO), monkeypatch)
    assert (platform.device_name, platform.vendor_name, platform.communication_backend_name()) == ("cpu", "cpu", "gloo")
    assert torch.ones(1).to(platform.current_device()).device.type == "cpu"
    assert (platform.ray_resource_name(), platform.ray_resource_options(0.5)) == ("CPU", {"num_cpus": 0.5})
    assert not platform.is_ipc_supported() and not platform.is_platform_available(use_smi_check=True)
    assert platform.get_device_capability() == (None, None)
    device = platform.device_module
    assert device.get_device_name() == hwrl_cpu.INFO.description
    assert device.max_memory_allocated() >= 0 and device.mem_get_info()[1] > 0
    assert device.is_available() and device.stream is torch.cpu.stream  # torch's own
    with pytest.raises(AttributeError, match="memory_snapshot"):
        _ = device.memory_snapshot
    platform.synchronize(0)
    platform.empty_cache()
    platform.set_allocator_settings("expandable_segments:True")
    platform.profiler_start()
    with platform.nvtx_range("a step"):
        platform.profiler_stop()
    draws = []
    for seed in (1, 2, 1):
        platform.manual_seed_all(seed)
        draws.append(torch.rand(4))
    assert torch.equal(draws[0], draws[2]) and not torch.equal(draws[0], draws[1])


@pytest.mark.parametrize(
    ("backend", "resource", "options", "noset", "variable"),
    [
        (
            hwrl_cuda.CudaBackend(hwrl_cuda.INFO),
            "GPU",
            {"num_gpus": 0.5},
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
            "NCCL_CUMEM_ENABLE",
        ),
        (
            hwrl_npu.NpuBackend(hwrl_npu.INFO),
            "NPU",
            {"resources": {"NPU": 0.5}},
            "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES",
            "VLLM_ASCEND_AUTO_DETECT_QUANTIZATION",
        ),
    ],
    ids=["cuda", "npu"],
)
def test_ray_and_rollouts_get_what_verls_own_platform_gives(
    backend: Backend,
    resource: str,
    options: dict[str, object],
    noset: str,
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    platform = platform_of(backend, monkeypatch)
    assert (platform.ray_resource_name(), platform.ray_resource_options(0.5)) == (resource, options)
    assert platform.ray_noset_envvars() == [noset]
    assert variable in platform.rollout_env_vars()


def test_a_device_without_a_library_has_staged_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBERED_MUTE", "1")
    platform = platform_of(NumberedBackend(INFO), monkeypatch)
    library = platform.communication_backend_name()
    dist.init_process_group(f"{platform.device_name}:{library}", store=HashStore(), rank=0, world_size=1)
    try:
        reduced = torch.ones(2)
        dist.all_reduce(reduced)
        assert library != "gloo" and torch.equal(reduced, torch.ones(2))
    finally:
        dist.destroy_process_group()
