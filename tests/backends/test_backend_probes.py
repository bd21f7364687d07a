"""The probes and device maps of the shipped accelerator backends, on imitated machines."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import hwrl_cpu
import hwrl_cuda
import hwrl_npu
from hwrl.discovery import Registry
from hwrl.errors import BackendAmbiguousError, BackendUnavailableError, ConfigError
from hwrl.interfaces import Capability, Finding, ProbeContext
from tests.support.machines import CUDA_TORCH, HOST_TORCH, Machine, machine

__all__ = ["machine"]  # a fixture


def test_a_bare_machine_has_no_accelerator_and_leaves_no_evidence(machine: Machine) -> None:
    machine.with_module("torch", CUDA_TORCH).with_module("torch_npu")
    for plugin in (hwrl_cuda, hwrl_npu):
        result = plugin.hwrl_probe(machine.context())
        assert (result.answer, result.evidence) == ("no", ())
        assert "/dev/" in result.reason


def test_a_machine_with_gpus_and_a_torch_for_them(machine: Machine) -> None:
    machine.with_devices("nvidia0", "nvidia1", "nvidiactl").with_module("torch", CUDA_TORCH)
    result = hwrl_cuda.hwrl_probe(machine.context())
    assert (result.answer, result.evidence) == ("yes", ("/dev/nvidia0", "/dev/nvidia1"))


def test_gpus_with_a_torch_for_the_host_are_evidence_with_a_reason(machine: Machine) -> None:
    machine.with_devices("nvidia0").with_module("torch", HOST_TORCH)
    result = hwrl_cuda.hwrl_probe(machine.context())
    assert (result.answer, result.evidence) == ("no", ("/dev/nvidia0",))
    assert "2.13.0+cpu is not built for CUDA" in result.reason


def test_gpus_without_torch(machine: Machine) -> None:
    result = hwrl_cuda.hwrl_probe(machine.with_devices("nvidia0").context())
    assert (result.answer, result.reason) == ("no", "torch is not installed")


def test_a_gpu_under_a_subsystem_cannot_be_told_from_files(machine: Machine) -> None:
    machine.with_devices("dxg").with_module("torch", CUDA_TORCH)
    result = hwrl_cuda.hwrl_probe(machine.context())
    assert (result.answer, result.evidence) == ("unknown", ("/dev/dxg",))


def test_a_machine_with_npus(machine: Machine) -> None:
    machine.with_devices("davinci0", "davinci_manager").with_module("torch", HOST_TORCH).with_module("torch_npu")
    result = hwrl_npu.hwrl_probe(machine.context())
    assert (result.answer, result.evidence) == ("yes", ("/dev/davinci0",))


def test_npus_with_a_torch_for_gpus_that_are_not_there(machine: Machine) -> None:
    """PyPI's torch 2.10 for x86-64, with which vllm-ascend is installed."""
    machine.with_devices("davinci0").with_module("torch", CUDA_TORCH).with_module("torch_npu")
    assert hwrl_npu.hwrl_probe(machine.context()).answer == "yes"


@pytest.mark.parametrize(
    ("torch_text", "modules", "said"),
    [
        (HOST_TORCH, (), "torch_npu not installed"),
        (CUDA_TORCH, ("torch_npu",), "torch is built for CUDA and has a GPU (/dev/nvidia0); torch_npu refuses that"),
    ],
)
def test_npus_that_cannot_be_used_are_evidence_with_a_reason(
    machine: Machine, torch_text: str, modules: tuple[str, ...], said: str
) -> None:
    machine.with_devices("davinci0", "nvidia0").with_module("torch", torch_text)
    for name in modules:
        machine.with_module(name)
    result = hwrl_npu.hwrl_probe(machine.context())
    assert (result.answer, result.evidence) == ("no", ("/dev/davinci0",))
    assert said in result.reason


# Plugin, its vendor, its classes, another class of that vendor: a GPU's sound, a server's screen behind its controller.
PCI = [
    (hwrl_cuda, "0x10de", ("0x030000", "0x030200"), "0x040300"),
    (hwrl_npu, "0x19e5", ("0x120000", "0x120000"), "0x030000"),
]


@pytest.mark.parametrize(("plugin", "vendor", "kinds", "other"), PCI)
def test_a_device_without_a_driver_is_evidence_with_its_remedy(
    machine: Machine, plugin: Any, vendor: str, kinds: tuple[str, str], other: str
) -> None:
    machine.with_module("torch", CUDA_TORCH).with_module("torch_npu")
    machine.with_pci("0000:00:02.0", vendor=vendor, kind=other).with_pci("0000:00:03.0", vendor="0x8086", kind=kinds[0])
    assert plugin.hwrl_probe(machine.context()).evidence == ()
    machine.with_pci("0000:17:00.0", vendor=vendor, kind=kinds[0])
    machine.with_pci("0000:ca:00.0", vendor=vendor, kind=kinds[1], driver="vfio-pci")
    result = plugin.hwrl_probe(machine.context())
    assert result.answer == "no"
    assert result.evidence == tuple(f"/sys/bus/pci/devices/0000:{slot}:00.0" for slot in ("17", "ca"))
    assert "the PCI bus has 2 " in result.reason and " (driver vfio-pci, no driver): " in result.reason
    assert " load the " in result.reason and "start the container with its" in result.reason


@pytest.mark.parametrize(("vendor", "kind"), [("0x10de", "0x030000"), ("0x19e5", "0x120000")])
def test_a_device_without_a_driver_is_not_replaced_by_the_cpu_unless_the_user_says_so(
    machine: Machine, vendor: str, kind: str
) -> None:
    machine.with_module("torch", CUDA_TORCH).with_pci("0000:17:00.0", vendor=vendor, kind=kind)
    with pytest.raises(BackendAmbiguousError, match="will not fall back to 'cpu'") as caught:
        Registry(env={}, context=machine.context()).choose()
    assert "/sys/bus/pci/devices/0000:17:00.0" in caught.value.why
    assert "set HWRL_BACKEND=cpu if 'cpu' is meant" in caught.value.fix
    chosen = Registry(env={"HWRL_BACKEND": "cpu"}, context=machine.context()).choose()
    assert chosen.plugin.info.name == "cpu"


def test_a_device_that_is_unplugged_meanwhile_is_none(machine: Machine) -> None:
    machine.with_pci("0000:17:00.0", vendor="0x10de", kind="0x030000")
    (machine.root / "sys/bus/pci/devices/0000:17:00.0/vendor").unlink()
    assert hwrl_cuda.hwrl_probe(machine.context()).evidence == ()


def test_the_host_needs_torch(machine: Machine) -> None:
    assert hwrl_cpu.hwrl_probe(machine.context()).answer == "no"
    assert hwrl_cpu.hwrl_probe(machine.with_module("torch").context()).answer == "yes"


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed here")
def test_an_npu_backend_without_its_library_says_what_to_do() -> None:
    with pytest.raises(BackendUnavailableError, match=r"set_env\.sh") as caught:
        hwrl_npu.hwrl_create_backend()
    assert isinstance(caught.value.__cause__, ImportError)


# -- device maps ----------------------------------------------------------------------------------------------------

CUDA, NPU, HOST = hwrl_cuda.CudaBackend.devices, hwrl_npu.NpuBackend.devices, hwrl_cpu.CpuBackend.devices


def test_ray_reserves_devices_under_the_devices_own_name() -> None:
    assert CUDA.ray_options(2) == {"num_gpus": 2}
    assert NPU.ray_options(2) == {"resources": {"NPU": 2}}
    assert HOST.ray_options(2) == {"num_cpus": 2}


@pytest.mark.parametrize(
    ("env", "visible"),
    [({"CUDA_VISIBLE_DEVICES": text}, ids) for text, ids in {"": (), "-1": (), "2": (2,), " 3, 1 ": (3, 1)}.items()],
)
def test_visible_gpus_are_read_from_the_environment(env: Mapping[str, str], visible: tuple[int, ...]) -> None:
    assert CUDA.visible(env) == visible


def test_an_environment_that_narrows_nothing_is_no_list() -> None:
    assert CUDA.visible({"ASCEND_RT_VISIBLE_DEVICES": "0"}) is None


@pytest.mark.parametrize("text", ["a", "0,0", "0,-1", "0;1", "0,,1"])
def test_unreadable_device_lists_are_errors_that_show_the_value(text: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES='"):
        CUDA.visible({"CUDA_VISIBLE_DEVICES": text})


def test_npus_must_be_in_ascending_order_and_are_rendered_so() -> None:
    with pytest.raises(ConfigError, match="set ASCEND_RT_VISIBLE_DEVICES=0,1"):
        NPU.visible({"ASCEND_RT_VISIBLE_DEVICES": "1,0"})
    assert NPU.render([5, 2]) == {"ASCEND_RT_VISIBLE_DEVICES": "2,5"}
    assert NPU.visible(NPU.render([5, 2])) == (2, 5)


def test_logical_devices_map_to_physical_ones() -> None:
    env = CUDA.render([4, 6])
    assert [CUDA.to_physical(index, env) for index in range(2)] == [4, 6]
    assert CUDA.to_physical(3, {}) == 3
    with pytest.raises(ConfigError, match="device 2 is not visible"):
        CUDA.to_physical(2, env)


# -- what doctor is told --------------------------------------------------------------------------------------------


def test_doctor_is_told_about_hidden_gpus(machine: Machine) -> None:
    findings = list(hwrl_cuda.hwrl_doctor(machine.context(CUDA_VISIBLE_DEVICES="")))
    assert [finding.level for finding in findings] == ["info", "warning"]
    assert list(hwrl_cuda.hwrl_doctor(machine.context())) == []


def test_doctor_is_told_that_the_npu_order_shows_no_device(machine: Machine) -> None:
    machine.with_devices("davinci0", "davinci1")
    env = {"ASCEND_RT_VISIBLE_DEVICES": "1,0", "ASCEND_HOME_PATH": "/usr/local/Ascend"}
    findings = list(hwrl_npu.hwrl_doctor(machine.context(**env)))
    assert findings[-1] == Finding(
        "error",
        "ASCEND_RT_VISIBLE_DEVICES='1,0' shows no device: the runtime wants strictly ascending numbers",
        fix="set ASCEND_RT_VISIBLE_DEVICES=0,1",
    )


NPU_TROUBLES = {
    "both allocator settings": (
        {"PYTORCH_ALLOC_CONF": "", "PYTORCH_NPU_ALLOC_CONF": "page_size:1g"},
        "both set: torch_npu refuses that, even if one is empty",
        "unset PYTORCH_ALLOC_CONF",
    ),
    "settings that exclude each other": (
        {"PYTORCH_NPU_ALLOC_CONF": "max_split_size_mb:64, expandable_segments:True"},
        "expandable_segments goes with no max_split_size_mb",
        "take one of them out",
    ),
    "a device that is not there": (
        {"ASCEND_RT_VISIBLE_DEVICES": "0,9"},
        "ASCEND_RT_VISIBLE_DEVICES=0,9 names 9, which the runtime drops without a word",
        "this machine shows 2 devices: use numbers below 2",
    ),
    "a list that is no list": ({"ASCEND_RT_VISIBLE_DEVICES": "3;2"}, "cannot be read", "ASCEND_RT_VISIBLE_DEVICES=0,1"),
    "a rank table": ({"RANK_TABLE_FILE": "/ranks.json"}, "weights cannot travel", "unset it"),
}


@pytest.mark.parametrize("trouble", NPU_TROUBLES)
def test_doctor_is_told_what_stops_a_run_on_npus(machine: Machine, trouble: str) -> None:
    env, said, fix = NPU_TROUBLES[trouble]
    machine.with_devices("davinci0", "davinci1")
    errors = [found for found in hwrl_npu.hwrl_doctor(machine.context(**env)) if found.level == "error"]
    assert [(said in error.message, fix in error.fix) for error in errors] == [(True, True)]


def test_doctor_is_told_that_torch_and_torch_npu_do_not_fit(machine: Machine) -> None:
    machine.with_devices("davinci0").with_module("torch", HOST_TORCH)
    machine.with_module("torch_npu", "__version__ = '2.10.0.post4'\n")
    (error,) = [found for found in hwrl_npu.hwrl_doctor(machine.context()) if found.level == "error"]
    assert error == Finding("error", "torch_npu 2.10 is not made for torch 2.13", fix="install torch_npu 2.13.*")


@pytest.mark.parametrize(("size", "cost"), [(None, "400 MB"), ("64", "128 MB"), ("lots", "twice lots")])
def test_doctor_is_told_what_a_communicator_costs(machine: Machine, size: str | None, cost: str) -> None:
    env = {} if size is None else {"HCCL_BUFFSIZE": size}
    findings = list(hwrl_npu.hwrl_doctor(machine.with_devices("davinci0").context(**env)))
    assert any(found.level == "info" and f"takes {cost} of device memory" in found.message for found in findings)


def test_a_sound_npu_machine_has_no_errors(machine: Machine) -> None:
    machine.with_devices("davinci0", "davinci1").with_module("torch", HOST_TORCH).with_module("torch_npu", HOST_TORCH)
    env = {"ASCEND_HOME_PATH": "/usr/local/Ascend", "ASCEND_RT_VISIBLE_DEVICES": "0,1", "PYTORCH_ALLOC_CONF": ""}
    assert {found.level for found in hwrl_npu.hwrl_doctor(machine.context(**env))} == {"info"}


def test_half_an_hour_is_told_to_torch_npu_so_that_it_is_not_read_as_the_default() -> None:
    backend = hwrl_npu.NpuBackend(hwrl_npu.INFO)
    assert [backend.library_timeout(given).total_seconds() for given in (60.0, 1800.0)] == [60.0, 1801.0]


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_trainer_on_gpus_gets_expandable_segments_unless_the_user_configures_the_allocator(name: str) -> None:
    wanted = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert hwrl_cuda.hwrl_process_env(role="trainer", env={}, exports_memory=False) == wanted
    assert hwrl_cuda.hwrl_process_env(role="trainer", env={name: ""}, exports_memory=False) == {}
    assert hwrl_cuda.hwrl_process_env(role="rollout", env={}, exports_memory=False) == {}
    assert hwrl_cuda.hwrl_process_env(role="trainer", env={}, exports_memory=True) == {}


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF"])
def test_a_worker_on_npus_never_gets_a_second_allocator_setting(name: str) -> None:
    alone = {"exports_memory": False, "shares_device": False}
    wanted = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
    assert hwrl_npu.hwrl_process_env(role="trainer", env={}, **alone) == wanted
    assert hwrl_npu.hwrl_process_env(role="trainer", env={name: ""}, **alone) == {}
    assert hwrl_npu.hwrl_process_env(role="rollout", env={}, **alone) == {}
    assert hwrl_npu.hwrl_process_env(role="trainer", env={}, exports_memory=True, shares_device=False) == {}


def test_workers_that_share_an_npu_do_not_ask_for_the_same_ports() -> None:
    shared = {"exports_memory": True, "shares_device": True}
    both = {"HCCL_HOST_SOCKET_PORT_RANGE": "auto", "HCCL_NPU_SOCKET_PORT_RANGE": "auto"}
    for role in ("trainer", "rollout"):
        assert hwrl_npu.hwrl_process_env(role=role, env={}, **shared) == both
    fewer = hwrl_npu.hwrl_process_env(role="rollout", env={"HCCL_IF_BASE_PORT": "50000"}, **shared)
    assert fewer == {"HCCL_NPU_SOCKET_PORT_RANGE": "auto"}, "the range would override the user's base port"


def test_doctor_is_told_about_two_allocator_settings(machine: Machine) -> None:
    env = {"PYTORCH_ALLOC_CONF": "", "PYTORCH_CUDA_ALLOC_CONF": ""}
    findings = list(hwrl_cuda.hwrl_doctor(machine.context(**env)))
    assert findings[-1].level == "warning"
    assert findings[-1].fix == "unset PYTORCH_CUDA_ALLOC_CONF"


def test_expandable_segments_cannot_be_opened_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = hwrl_cuda.CudaBackend(hwrl_cuda.INFO)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64, expandable_segments: True")
    assert not backend.supports(Capability.DEVICE_IPC).usable
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert backend.supports(Capability.DEVICE_IPC).usable


# -- where device files are -----------------------------------------------------------------------------------------


def test_probes_look_under_another_folder_if_they_are_told_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.with_devices("davinci0", "davinci1")
    monkeypatch.setenv("HWRL_PROBE_ROOT", str(machine.root))
    assert ProbeContext().device_files("dev/davinci[0-9]*") == ("/dev/davinci0", "/dev/davinci1")
    monkeypatch.delenv("HWRL_PROBE_ROOT")
    assert ProbeContext().root == Path("/")


def test_gpus_that_are_named_by_uuid_are_given_out_under_it() -> None:
    env = {"CUDA_VISIBLE_DEVICES": "GPU-1f, MIG-2e"}
    assert CUDA.narrow([1], env) == {"CUDA_VISIBLE_DEVICES": "MIG-2e"}
    assert CUDA.name(0, env) == "GPU-1f"
    for shown in ("GPU-1f, MIG-2e", "-1"):
        with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
            CUDA.narrow([2], {"CUDA_VISIBLE_DEVICES": shown})
    assert CUDA.narrow([1, 0], {"CUDA_VISIBLE_DEVICES": "4,6"}) == {"CUDA_VISIBLE_DEVICES": "6,4"}
    assert CUDA.narrow([1], {}) == {"CUDA_VISIBLE_DEVICES": "1"}
