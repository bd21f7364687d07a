"""Signs of accelerators other than NVIDIA's and Huawei's: a run must not take the CPU beside one by itself.

A backend package for one of them needs nothing here: detection prefers its "yes".
"""

from __future__ import annotations

import os
import re
from collections import defaultdict

from hwrl.interfaces import PciDevice, ProbeContext

_AMD, _INTEL = 0x1002, 0x8086
_KFD = "dev/kfd"
_DEVICE_FILES = {
    _KFD: "AMD GPU",
    "dev/mkfd": "Hygon DCU",
    "dev/accel/accel[0-9]*": "accelerator of Linux's accel class",
    "dev/accel[0-9]*": "Google TPU",
    "dev/hl[0-9]*": "Intel Gaudi",
    "dev/hl_control*": "Intel Gaudi",
    "dev/cambricon_ctl": "Cambricon MLU",
    "dev/cambricon_dev*": "Cambricon MLU",
    "dev/mxcd": "MetaX GPU",
    "dev/mtgpu*": "Moore Threads GPU",
    "dev/xpu*": "Kunlun XPU",
    "dev/neuron[0-9]*": "AWS Neuron device",
    "dev/gcu[0-9]*": "Enflame GCU",
    "dev/iluvatar*": "Iluvatar GPU",
    "dev/biren*": "Biren GPU",
    "dev/alixpu*": "T-Head PPU",
    "dev/tenstorrent/[0-9]*": "Tenstorrent device",
    "dev/rbln[0-9]*": "Rebellions NPU",
    "dev/qaic*": "Qualcomm Cloud AI card",
    "dev/nvhost-*gpu": "NVIDIA Jetson",
    "dev/nvgpu/igpu*": "NVIDIA Jetson",
    "dev/ipu[0-9]*": "Graphcore IPU",
    "dev/npu[0-9]*": "FuriosaAI NPU",
    "dev/rngd/*": "FuriosaAI NPU",
    "dev/bm-sophon*": "Sophgo TPU",
}
_VENDORS = {
    _AMD: "AMD GPU",
    _INTEL: "Intel accelerator",
    0x1DA3: "Intel Gaudi",
    0x1ED5: "Moore Threads GPU",
    0x9999: "MetaX GPU",
    0xCABC: "Cambricon MLU",
    0x1D22: "Kunlun XPU",
    0x1D94: "Hygon DCU",
    0x1E36: "Enflame GCU",
    0x1E3E: "Iluvatar GPU",
    0x1EE0: "Biren GPU",
    0x1E52: "Tenstorrent device",
    0x1AE0: "Google TPU",
    0x1D0F: "AWS Neuron device",
    0x17CB: "Qualcomm Cloud AI card",
    0x10EE: "AMD Xilinx accelerator",
}
_ACCELERATOR, _DISPLAY = 0x12, 0x03  # base classes of the PCI bus
_WITHOUT_SCREEN = (0x0302, 0x0380)  # 3D controllers, and display controllers other than VGA
_ONLY_GPUS = (0x1ED5, 0x9999, 0x1E3E, 0x1EE0)  # vendors without integrated graphics: VGA controllers count, too
_WITH_BACKEND = {(0x10DE, _DISPLAY), (0x19E5, _ACCELERATOR)}  # the probes of hwrl_cuda and hwrl_npu speak for these
_OF_ANY_CLASS = {  # their class says nothing: GPUs of AMD have this switch inside, graphics of processors do not
    _AMD: (0x1471, 0x1479),
    0x1AE0: (0x0027, 0x0056, 0x005E, 0x0062, 0x0063, 0x006F, 0x0076),
    0x1D0F: (0x7064, 0x7065, 0x7066, 0x7067, 0x7164, 0x7264, 0x7364, 0x7564),
}
_SCREENS = (
    *(0x1AF4, 0x1234, 0x1B36, 0x15AD, 0x80EE, 0x1414, 0x1AB8, 0x5853, 0x1013, 0x1D0F),  # of hypervisors
    *(0x1A03, 0x102B, 0x126F, 0x19E5, 0x0014, 0x1DB7),  # of servers' management controllers and chipsets
)
"""Vendors whose display controllers only draw a screen."""
_OTHER_DRIVERS = ("intel_vpu", "amdxdna", "xocl", "xclmgmt", "dfl-pci")
"""Drivers of what torch has no device for: laptops' NPUs, which infer only, and FPGA cards."""
_LAPTOP_CHIPS = (0x7D1D, 0xAD1D, 0x643E, 0xB03E, 0xFD3E)  # Intel's, where the driver is not loaded
_OWN_GRAPHICS = "/0000:00:02."  # of Intel's processors
_SMALL_NBYTES = 4 << 30  # the own graphics of AMD's processors have less memory than this, GPUs for torch have more
_TORCH_BUILD = re.compile(r"^(hip|rocm|xpu)\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)  # of torch's version file


def accelerator_signs(context: ProbeContext) -> dict[str, list[str]]:
    """Return the accelerators that this machine shows, each with its device files, PCI devices and torch builds."""
    found: dict[str, list[str]] = defaultdict(list)
    for pattern, name in _DEVICE_FILES.items():
        for file in context.device_files(pattern):
            if not _is_laptop_device(context, file):
                found[name].append(file)
    for device in context.pci_devices():
        if _is_accelerator(context, device):
            found[_VENDORS.get(device.vendor, f"accelerator of PCI vendor {device.vendor:#06x}")].append(device.path)
    for field, version in _TORCH_BUILD.findall(context.module_text("torch", "version.py") or ""):
        found[f"torch built for {field}"].append(f"torch.version.{field} = {version!r}")
    return dict(found)


def _is_accelerator(context: ProbeContext, device: PciDevice) -> bool:
    base_class = device.class_code >> 16
    if (device.vendor, base_class) in _WITH_BACKEND:
        return False
    if device.device in _OF_ANY_CLASS.get(device.vendor, ()):
        return True
    if base_class == _ACCELERATOR:
        laptop = device.vendor == _INTEL and device.device in _LAPTOP_CHIPS
        return not laptop and device.driver not in _OTHER_DRIVERS
    if base_class != _DISPLAY or device.vendor in _SCREENS:
        return False
    if device.vendor == _INTEL:
        return _OWN_GRAPHICS not in device.path
    if device.class_code >> 8 not in _WITHOUT_SCREEN:
        return device.vendor in _ONLY_GPUS
    return not _is_small(context, device)


def _is_laptop_device(context: ProbeContext, file: str) -> bool:
    """Return whether ``file`` is of a laptop's NPU, or of the driver of AMD's GPUs for small graphics only."""
    if file == f"/{_KFD}":
        graphics = context.pci_devices(vendor=_AMD, base_class=_DISPLAY)
        return bool(graphics) and all(_is_small(context, device) for device in graphics)
    driver = context.root / "sys/class/accel" / os.path.basename(file) / "device/driver"
    try:
        return os.path.basename(os.readlink(driver)) in _OTHER_DRIVERS
    except OSError:
        return False


def _is_small(context: ProbeContext, device: PciDevice) -> bool:
    """Return whether AMD's driver says that the device has little memory of its own."""
    try:
        text = (context.root / device.path.removeprefix("/") / "mem_info_vram_total").read_text(encoding="ascii")
        return int(text) < _SMALL_NBYTES
    except (OSError, ValueError):
        return False
