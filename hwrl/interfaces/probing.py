"""The input and the answer of a probe. A probe loads no torch and no vendor library, and makes no device context."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

PROBE_ROOT = "HWRL_PROBE_ROOT"
"""The environment variable with the root folder for probes, instead of /."""
_PCI_DEVICES = "sys/bus/pci/devices"


@dataclass(frozen=True)
class PciDevice:
    """A device on the PCI bus: its folder in sysfs, and its kernel driver, ``""`` if it has none.

    ``class_code`` has three bytes, as in sysfs; the highest one is the base class. A number is -1 if unreadable.
    """

    path: str
    driver: str
    vendor: int = -1
    device: int = -1
    class_code: int = -1


@dataclass(frozen=True)
class ProbeContext:
    """A probe's view of the machine. Tests inject one, so probes are testable without hardware.

    ``root`` is the folder with ``dev`` and ``sys``: ``HWRL_PROBE_ROOT``, else the root of the file system.
    """

    env: Mapping[str, str] = field(default_factory=lambda: os.environ)
    find_spec: Callable[[str], object | None] = importlib.util.find_spec
    root: Path = field(default_factory=lambda: Path(os.environ.get(PROBE_ROOT) or "/"))

    def device_files(self, pattern: str) -> tuple[str, ...]:
        """Return the paths under ``root`` for the glob ``pattern``, sorted, as absolute strings.

        >>> ProbeContext().device_files("dev/nul[l]")
        ('/dev/null',)
        """
        return tuple(sorted("/" + str(path.relative_to(self.root)) for path in self.root.glob(pattern)))

    def pci_devices(self, *, vendor: int | None = None, base_class: int | None = None) -> tuple[PciDevice, ...]:
        """Return the devices on the PCI bus, by vendor and base class (the highest byte of the class code).

        The bus also lists devices without a driver, and all devices of the host inside a container without devices.
        """
        return tuple(
            PciDevice(
                f"/{_PCI_DEVICES}/{name}",
                _driver(f"{self._bus}/{name}"),
                vendor=of,
                device=_hexadecimal(f"{self._bus}/{name}/device"),
                class_code=class_code,
            )
            for name, of, class_code in self._on_the_bus
            if vendor in (None, of) and base_class in (None, class_code >> 16)
        )

    @property
    def _bus(self) -> Path:
        return self.root / _PCI_DEVICES

    @functools.cached_property
    def _on_the_bus(self) -> list[tuple[str, int, int]]:
        """Name, vendor and class of each device. Read once: a server has a thousand, a probe has milliseconds."""
        try:
            names = sorted(os.listdir(self._bus))
        except OSError:
            return []
        folders = {name: f"{self._bus}/{name}" for name in names}
        return [(name, _hexadecimal(f"{at}/vendor"), _hexadecimal(f"{at}/class")) for name, at in folders.items()]

    def has_module(self, name: str) -> bool:
        """Return whether the top-level module ``name`` could be imported, without importing it."""
        return self._spec(name) is not None

    def module_text(self, name: str, file: str) -> str | None:
        """Return the text of ``file`` beside module ``name``, without importing it; None if there is none.

        >>> "JSONDecoder" in ProbeContext().module_text("json", "decoder.py")
        True
        """
        origin = getattr(self._spec(name), "origin", None)
        path = Path(origin).parent / file if origin else None
        return path.read_text(encoding="utf-8", errors="replace") if path and path.is_file() else None

    def _spec(self, name: str) -> object | None:
        try:
            return self.find_spec(name)
        except (ImportError, ValueError):  # ValueError: something without a spec is in sys.modules under this name
            return None


@dataclass(frozen=True)
class ProbeResult:
    """A probe's answer. ``evidence`` lists the signs of a device, even of a device that cannot run.

    Evidence is device files, places on a bus, or packages. That of a fallback is of devices which need another backend:
    detection then does not choose the fallback. ``rank`` orders several ``yes``: the highest wins, a tie is an error.
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
    context: ProbeContext,
    *,
    pattern: str,
    vendor: int,
    base_class: int,
    device: str,
    fix: str,
    ignored: Collection[int] = (),
) -> ProbeResult:
    """Return the answer "no" for a machine without the device files ``pattern``.

    If the PCI bus lists such devices, they are evidence, and the reason names their drivers and the ``fix``: the
    machine has the device but no driver, or the container did not get it. ``device`` is its name in messages.
    ``ignored`` are PCI device numbers of the vendor's other products in this class.
    """
    on_the_bus = context.pci_devices(vendor=vendor, base_class=base_class)
    found = [item for item in on_the_bus if item.device not in ignored]
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
    """Return the hexadecimal number in a file of sysfs, or -1 if the device was unplugged or the file is odd."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
        try:
            return int(os.read(descriptor, 32), 16)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return -1


def _driver(folder: str) -> str:
    try:
        return os.path.basename(os.readlink(f"{folder}/driver"))
    except OSError:
        return ""
