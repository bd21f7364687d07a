"""The backend package of a third party: what ``hwrl new-backend vulkan`` writes, with seven lines changed.

The device is torchvulkan's, from PyPI: any GPU with a driver for Vulkan, or the processor with Mesa's llvmpipe.
"""

from __future__ import annotations

from pathlib import Path

from hwrl.testing.levels import Kind
from hwrl_new.packages import write_package

EDITS = {
    "hwrl_vulkan/__init__.py": [
        ('EXTENSION = "torch_vulkan"', 'EXTENSION = "torchvulkan"'),
        ('DEVICE_FILES = "dev/vulkan[0-9]*"', 'DEVICE_FILES = "usr/share/vulkan/icd.d/*.json"'),
        ('"""The device files of the driver."""', '"""What a driver for Vulkan installs."""'),
        ("rank=100", "rank=10"),  # a vendor's own backend for the same GPU comes first
    ],
    "hwrl_vulkan/device.py": [
        ("import Backend, Capability, DeviceMap, Support", "import Capability, DeviceMap, StreamlessBackend, Support"),
        (
            'DEVICES = DeviceMap(visible_variable="VULKAN_VISIBLE_DEVICES", ray_resource="VULKAN")',
            "DEVICES = DeviceMap()",  # no variable hides its devices
        ),
        ("class DeviceBackend(Backend):", "class DeviceBackend(StreamlessBackend):"),  # torchvulkan has no streams
    ],
}
"""For each file of the package, the lines as they are written and as they are after the change."""


def write_vulkan_package(into: Path) -> Path:
    """Write the package hwrl-vulkan into the folder ``into``, changed for torchvulkan, and return its path."""
    package = write_package(Kind.BACKEND, "vulkan", into)
    for file, edits in EDITS.items():
        text = (package / file).read_text()
        for written, changed in edits:
            assert text.count(written) == 1, f"{file} has {written!r} {text.count(written)} times"
            text = text.replace(written, changed)
        (package / file).write_text(text)
    return package
