"""What detection does on imitated machines: an accelerator without a backend stops it, a screen does not."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest

from hwrl.discovery import Registry
from hwrl.errors import BackendAmbiguousError
from hwrl.interfaces import ProbeContext
from tests.support.machines import CUDA_TORCH, HOST_TORCH, ROCM_TORCH, XPU_TORCH, Machine, machine

__all__ = ["machine"]  # a fixture

Build = Callable[[Machine], Machine]
SLOT = "0000:17:00.0"


def pci(vendor: str, kind: str, *, slot: str = SLOT, driver: str = "", **files: str) -> Build:
    return lambda machine: machine.with_pci(slot, vendor=vendor, kind=kind, driver=driver, **files)


def dev(*names: str) -> Build:
    return lambda machine: machine.with_devices(*names)


STOPPED: dict[str, tuple[list[Build], str]] = {
    "AMD, driver loaded": ([dev("kfd", "dri/renderD128"), pci("0x1002", "0x038000")], "AMD GPU"),
    "AMD, device file alone": ([dev("kfd")], "AMD GPU"),
    "AMD, bus alone": ([pci("0x1002", "0x038000")], "AMD GPU"),
    "AMD, MI300 on the bus": ([pci("0x1002", "0x120000")], "AMD GPU"),
    "AMD, large Radeon": (
        [dev("kfd"), pci("0x1002", "0x030000", driver="amdgpu", mem_info_vram_total="25753026560")],
        "AMD GPU",
    ),
    "Intel data center GPU": ([dev("dri/renderD128"), pci("0x8086", "0x038000")], "Intel accelerator"),
    "AMD, large Radeon without a driver": (
        [pci("0x1002", "0x030000"), pci("0x1002", "0x060400", slot="0000:16:00.0", device="0x1479")],
        "AMD GPU",
    ),
    "Intel Arc": (
        [pci("0x8086", "0x030000", slot="0000:00:02.0"), pci("0x8086", "0x030000", device="0x56a0", driver="xe")],
        "Intel accelerator",
    ),
    "Jetson with a new kernel": ([dev("nvgpu/igpu0/ctrl")], "NVIDIA Jetson"),
    "Graphcore": ([dev("ipu0")], "Graphcore IPU"),
    "FuriosaAI": ([dev("rngd/npu0mgmt")], "FuriosaAI NPU"),
    "Sophgo": ([dev("bm-sophon0")], "Sophgo TPU"),
    "Gaudi, device file": ([dev("hl0", "hl_controlD0")], "Intel Gaudi"),
    "Gaudi, accel class": ([dev("accel/accel0"), pci("0x1da3", "0x120000")], "Intel Gaudi"),
    "MLU, device files": ([dev("cambricon_ctl", "cambricon_dev0")], "Cambricon MLU"),
    "MLU, bus alone": ([pci("0xcabc", "0x120000")], "Cambricon MLU"),
    "MetaX": ([dev("mxcd", "dri/renderD128")], "MetaX GPU"),
    "MUSA, device file": ([dev("mtgpu.0")], "Moore Threads GPU"),
    "MUSA, a VGA class": ([pci("0x1ed5", "0x030000")], "Moore Threads GPU"),
    "Kunlun": ([dev("xpu0", "xpuctrl")], "Kunlun XPU"),
    "TPU, device file": ([dev("accel0")], "Google TPU"),
    "TPU behind vfio": ([pci("0x1ae0", "0xff0000", device="0x0063")], "Google TPU"),
    "Trainium": ([pci("0x1d0f", "0x088000", device="0x7164")], "AWS Neuron device"),
    "unknown accelerator": ([pci("0xbeef", "0x120000")], "PCI vendor 0xbeef"),
    "unknown 3D controller": ([pci("0xbeef", "0x030200")], "PCI vendor 0xbeef"),
    "NVIDIA, module not loaded": ([pci("0x10de", "0x030200")], "1 NVIDIA GPU(s) (no driver)"),
    "Ascend, driver not loaded": ([pci("0x19e5", "0x120000")], "1 Ascend NPU(s) (no driver)"),
    "a plugin says no for its torch": ([dev("davinci0")], "torch_npu not installed"),
}
GOOD: dict[str, list[Build]] = {
    "bare": [],
    "ASPEED of a server": [pci("0x1a03", "0x030000")],
    "Matrox of a server": [pci("0x102b", "0x030000")],
    "Intel laptop": [dev("dri/renderD128", "dri/card0"), pci("0x8086", "0x030000", slot="0000:00:02.0")],
    "Intel graphics beside another screen": [pci("0x8086", "0x038000", slot="0000:00:02.0")],
    "Intel laptop with an NPU": [
        dev("accel/accel0"),
        lambda machine: machine.with_accel_driver("accel0", "intel_vpu"),
        pci("0x8086", "0x120000", slot="0000:00:0b.0", driver="intel_vpu"),
    ],
    "Intel laptop, its NPU's driver not loaded": [pci("0x8086", "0x120000", device="0x7d1d")],
    "AMD laptop": [
        dev("kfd", "dri/renderD128"),
        pci("0x1002", "0x030000", driver="amdgpu", mem_info_vram_total="536870912"),
    ],
    "AMD laptop without a driver": [pci("0x1002", "0x030000")],
    "virtio-gpu": [dev("dri/renderD128"), pci("0x1af4", "0x038000")],
    "VMware": [pci("0x15ad", "0x030000")],
    "WSL": [pci("0x1414", "0x030200")],
    "GCP's network card": [pci("0x1ae0", "0x020000", device="0x0042")],
    "EC2's disk and screen": [
        pci("0x1d0f", "0x010802", device="0x8061"),
        pci("0x1d0f", "0x030000", slot="0000:00:03.0"),
    ],
    "Kunpeng server": [pci("0x19e5", "0x120000", device="0xa250", driver="hisi_zip")],
    "FPGA cards": [
        pci("0x10ee", "0x120000", device="0x5005", driver="xocl"),
        pci("0x8086", "0x120000", slot="0000:18:00.0", device="0x09c4", driver="dfl-pci"),
    ],
    "Phytium desktop": [pci("0x1db7", "0x038000", device="0xdc3e")],
    "other files with such names": [dev("hla_trace", "accelerometer", "kvm", "xvda", "hpet", "accel/by-path")],
    "damaged bus": [pci("a file that lies", "0x120000x"), pci("", "", slot="0000:18:00.0")],
}


def choose(machine: Machine, **env: str) -> str:
    return Registry(env=env, context=machine.context(**env)).choose().plugin.info.name


@pytest.mark.parametrize("case", STOPPED)
def test_an_accelerator_without_a_backend_stops_the_run_with_its_name(machine: Machine, case: str) -> None:
    parts, name = STOPPED[case]
    for part in parts:
        part(machine)
    machine.with_module("torch", HOST_TORCH)
    with pytest.raises(BackendAmbiguousError, match="will not fall back to 'cpu'") as caught:
        choose(machine)
    assert name in caught.value.why
    assert "(found /" in caught.value.why
    assert "install" in str(caught.value) and "set HWRL_BACKEND=cpu if 'cpu' is meant" in caught.value.fix
    assert choose(machine, HWRL_BACKEND="cpu") == "cpu"


@pytest.mark.parametrize("case", GOOD)
def test_a_machine_with_a_screen_at_most_runs_on_the_cpu(machine: Machine, case: str) -> None:
    for part in GOOD[case]:
        part(machine)
    assert choose(machine.with_module("torch", CUDA_TORCH)) == "cpu"


@pytest.mark.parametrize(("text", "said"), [(ROCM_TORCH, "hip = '7.2.1'"), (XPU_TORCH, "xpu = '20260100'")])
def test_a_torch_for_another_device_is_a_sign_of_one(machine: Machine, text: str, said: str) -> None:
    with pytest.raises(BackendAmbiguousError, match="torch built for") as caught:
        choose(machine.with_module("torch", text))
    assert said in caught.value.why


@pytest.mark.parametrize(("value", "claimed"), [("torch_strange:_autoload", False), ("torch_npu:_autoload", True)])
def test_an_extension_of_torch_that_no_backend_claims_is_a_sign_of_a_device(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, value: str, claimed: bool
) -> None:
    metadata = machine.root / "strange-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: strange\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[torch.backends]\ndevice_backend = {value}\n")
    monkeypatch.syspath_prepend(str(machine.root))
    machine.with_module("torch", HOST_TORCH)
    if claimed:
        assert choose(machine) == "cpu"
    else:
        with pytest.raises(BackendAmbiguousError, match="extension 'torch_strange'"):
            choose(machine)


def test_a_folder_for_probes_that_is_not_there_is_not_an_empty_machine(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.with_module("torch", HOST_TORCH)
    monkeypatch.setenv("HWRL_PROBE_ROOT", str(machine.root / "absent"))
    with pytest.raises(BackendAmbiguousError, match="absent, and there is no such folder"):
        Registry(env={}).choose()
    monkeypatch.setenv("HWRL_PROBE_ROOT", "")
    assert ProbeContext().root == Path("/")


def test_odd_files_of_the_bus_neither_crash_nor_block_a_probe(machine: Machine) -> None:
    machine.with_module("torch", HOST_TORCH)
    folder = machine.root / "sys/bus/pci/devices/0000:01:00.0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "vendor")
    (folder / "class").mkdir()
    (folder.parent / "a file").touch()
    (folder.parent / os.fsdecode(b"\xff")).mkdir()
    assert choose(machine) == "cpu"
    (machine.root / "torch/version.py").write_bytes(b"\xff\xfe hip = 'x\x1b[2J'")
    assert choose(machine) == "cpu"


def test_doctor_shows_the_accelerator_even_where_the_cpu_is_meant(machine: Machine) -> None:
    machine.with_devices("kfd")
    env = os.environ | {"HWRL_PROBE_ROOT": str(machine.root), "HWRL_BACKEND": ""}
    hwrl = Path(sysconfig.get_path("scripts")) / "hwrl"
    ended = subprocess.run([hwrl, "doctor"], env=env, text=True, capture_output=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert "but this one shows AMD GPU" in ended.stdout and "found /dev/kfd" in ended.stdout
    assert "chosen: none\n  why: will not fall back to 'cpu' by itself" in ended.stdout
