"""The input and the answer of a probe. A probe loads no torch and no vendor library, and makes no device context."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PROBE_ROOT = "HWRL_PROBE_ROOT"
"""The environment variable with the root folder for probes, instead of /."""
_PCI_DEVICES = "sys/bus/pci/devices"


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCI bus: its folder in sysfs, and its kernel driver, ``""`` if it has none."""

    path: str
    driver: str


@dataclass(frozen=True)
class ProbeContext:
    """A probe's view of the machine. Tests inject one, so probes are testable without hardware.

    ``root`` is the folder with ``dev`` and ``sys``: ``HWRL_PROBE_ROOT``, else the root of the file system.
    """

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_spec: Callable[[str], object | None] = importlib.util.find_spec
    root: Path = field(default_factory=lambda: Path(os.environ.get(PROBE_ROOT, "/")))

    def device_files(self, pattern: str) -> tuple[str, ...]:
        """Return the paths under ``root`` for the glob ``pattern``, sorted, as absolute strings.

        >>> ProbeContext().device_files("dev/nul[l]")
        ('/dev/null',)
        """
        return tuple(sorted("/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern)))

    def pci_devices(self, *, vendor: int, base_class: int) -> tuple[PciDevice, ...]:
        """Return the devices on the PCI bus with this vendor and base class (the highest byte of the class code).

        The bus also lists devices without a driver, and all devices of the host inside a container without devices.
        """
        bus = self.root / _PCI_DEVICES
        names = sorted(os.listdir(bus)) if bus.is_dir() else []
        return tuple(
            PciDevice(f"/{_PCI_DEVICES}/{name}", _driver(f"{bus}/{name}"))
            for name in names
            if _hexadecimal(f"{bus}/{name}/vendor") == vendor
            and _hexadecimal(f"{bus}/{name}/class") >> 16 == base_class
        )

    def has_module(self, name: str) -> bool:
        """Return whether the top-level module ``name`` could be imported, without importing it."""
        return self.find_spec(name) is not None

    def module_text(self, name: str, file: str) -> str | None:
        """Return the text of ``file`` beside module ``name``, without importing it; None if there is none.

        >>> "JSONDecoder" in ProbeContext().module_text("json", "decoder.py")
        True
        """
        origin = getattr(self.find_spec(name), "origin", None)
        path = Path(origin).parent / file if origin else None
        return path.read_text(encoding="utf-8") if path and path.is_file() else None


@dataclass(frozen=True)
class ProbeResult:
    """A probe's answer. ``evidence`` lists the signs of a device, even of a device that cannot run.

    Evidence is device files, or places on a bus. ``rank`` orders several ``yes``: the highest wins, a tie is an error.
    """

    answer: Literal["yes", "no", "unknown"]
    reason: str
    evidence: tuple[str, ...] = ()
    rank: int = 0


@dataclass(frozen=True)
class Finding:
    """One line of ``hwrl doctor``. An ``error`` will stop a run, and comes with its ``fix``."""

    level: Literal["info", "warning", "error"]
    message: str
    fix: str = ""


def without_device_files(
    context: ProbeContext, *, pattern: str, vendor: int, base_class: int, device: str, fix: str
) -> ProbeResult:
    """Return the answer "no" for a machine without the device files ``pattern``.

    If the PCI bus lists such devices, they are evidence, and the reason names their drivers and the ``fix``: the
    machine has the device but no driver, or the container did not get it. ``device`` is its name in messages.
    """
    found = context.pci_devices(vendor=vendor, base_class=base_class)
    reason = f"there is no /{pattern}"
    if not found:
        return ProbeResult("no", f"{reason}: this machine or container shows no {device}")
    drivers = ", ".join(sorted({f"driver {item.driver}" if item.driver else "no driver" for item in found}))
    return ProbeResult(
        "no",
        f"{reason}, but the PCI bus has {len(found)} {device}(s) ({drivers}): {fix}",
        tuple(item.path for item in found),
    )


def _hexadecimal(file: str) -> int:
    """Return the hexadecimal number in a file of sysfs, or -1 if the device was unplugged meanwhile."""
    try:
        with open(
            file, "rb", buffering=0
        ) as text:  # unbuffered: a server has a thousand devices, a probe has milliseconds
            return int(text.read(), 16)
    except FileNotFoundError:
        return -1


def _driver(folder: str) -> str:
    link = f"{folder}/driver"
    return os.path.basename(os.readlink(link)) if os.path.islink(link) else ""
