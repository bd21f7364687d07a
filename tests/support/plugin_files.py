"""Plugins for tests of the registry: real modules, and real entry points for them."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from hwrl.discovery import BACKEND_ENTRY_POINTS, Registry

SOURCE = """
import hwrl
from hwrl.interfaces import Backend, BackendInfo, ProbeResult

@hwrl.hookimpl
def hwrl_backend_info():
    return BackendInfo(name={name!r}, device_type="cpu", description="for a test", api={api!r}, fallback={fallback!r})

@hwrl.hookimpl
def hwrl_probe(context):
    return ProbeResult({answer!r}, {reason!r}, evidence={evidence!r}, rank={rank!r})

@hwrl.hookimpl
def hwrl_create_backend():
    return Backend(hwrl_backend_info())
"""


class PluginFiles:
    """Real plugin modules in a folder on ``sys.path``, real entry points for them, and an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entry_points: list[EntryPoint] = []
        self.env: dict[str, str] = {}

    def add(self, name: str, *, source: str = SOURCE, aliases: tuple[str, ...] = (), **settings: Any) -> str:
        """Add one plugin, whose source is filled with ``settings``; return its module's name."""
        module = f"{self.folder.name}_plugin_{len(self.entry_points)}_{name}"
        usual = {
            "name": name,
            "answer": "yes",
            "reason": f"{name} ran",
            "evidence": (),
            "rank": 0,
            "fallback": False,
            "api": (1, 0),
        }
        (self.folder / f"{module}.py").write_text(source.format(**(usual | settings)))
        self.entry_points += [EntryPoint(each, module, BACKEND_ENTRY_POINTS) for each in (name, *aliases)]
        return module

    def registry(self, **env: str) -> Registry:
        self.env = dict(env)
        return Registry(entry_points=self.entry_points, env=self.env)


@pytest.fixture
def plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PluginFiles:
    monkeypatch.syspath_prepend(str(tmp_path))
    return PluginFiles(tmp_path)


def install_plugin(folder: Path, name: str, *, source: str, distribution: str = "") -> str:
    """Install a plugin of the group ``hwrl.plugins`` into ``folder``, as pip would; return its module's name.

    It is found by processes with ``folder`` on ``sys.path``.
    """
    module = f"{folder.name.replace('-', '_')}_{name}"
    (folder / f"{module}.py").write_text(source)
    distribution = distribution or f"stranger_{name}"
    metadata = folder / f"{distribution}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[hwrl.plugins]\n{name} = {module}\n")
    return module
