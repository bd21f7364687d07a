"""Imitated machines for probes: device files, the PCI bus and installed modules, under a folder."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from hwrl.interfaces import ProbeContext

CUDA_TORCH = "__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
HOST_TORCH = "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\nhip: Optional[str] = None\n"


@dataclass
class Machine:
    """A folder that plays the root of a file system, with device files and installed modules."""

    root: Path

    def with_devices(self, *names: str) -> Machine:
        for name in names:
            (self.root / "dev" / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / "dev" / name).touch()
        return self

    def with_pci(self, address: str, *, vendor: str, kind: str, driver: str = "", **files: str) -> Machine:
        folder = self.root / "sys/bus/pci/devices" / address
        folder.mkdir(parents=True)
        for name, text in {"vendor": vendor, "class": kind, **files}.items():
            (folder / name).write_text(f"{text}\n")
        if driver:
            (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return self

    def with_accel_driver(self, name: str, driver: str) -> Machine:
        folder = self.root / "sys/class/accel" / name / "device"
        folder.mkdir(parents=True)
        (folder / "driver").symlink_to(f"../../../../bus/pci/drivers/{driver}")
        return self

    def with_module(self, name: str, version_text: str = "", **files: str) -> Machine:
        """Install ``name`` with a version.py, and with ``files``: the text of each, by its name without ".py"."""
        (self.root / name).mkdir()
        for file, text in {"version": version_text, **files}.items():
            (self.root / name / f"{file}.py").write_text(text)
        return self

    def context(self, **env: str) -> ProbeContext:
        return ProbeContext(env=env, find_spec=self._find_spec, root=self.root)

    def _find_spec(self, name: str) -> ModuleSpec | None:
        origin = self.root / name / "__init__.py"
        return ModuleSpec(name, None, origin=str(origin)) if origin.parent.is_dir() else None


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
