"""An imitated card, as an installed distribution with a backend, and ``hwrl doctor`` beside it."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

HWRL = Path(sysconfig.get_path("scripts")) / "hwrl"

CARD = """
import hwrl
from hwrl.interfaces import Backend, BackendInfo, Finding, ProbeResult

@hwrl.hookimpl
def hwrl_backend_info():
    return BackendInfo(name="card", device_type="cpu", description="an imitated card", api=(1, 0))

@hwrl.hookimpl
def hwrl_probe(context):
    return {probe}

@hwrl.hookimpl
def hwrl_create_backend():
    {create}

@hwrl.hookimpl
def hwrl_doctor(context):
    yield Finding({level!r}, "the firmware is old", fix="flash it")
"""
YES = "ProbeResult('yes', 'it blinks', evidence=('/dev/card0',), rank=500)"
HOST = "import hwrl_cpu; return hwrl_cpu.CpuBackend(hwrl_backend_info())"


def install(folder: Path, source: str = CARD, **settings: str) -> None:
    """Put a distribution into ``folder`` just as an installer leaves it: the module, and metadata beside it."""
    usual = {"probe": YES, "create": HOST, "level": "warning"}
    (folder / "hwrl_card.py").write_text(source.format(**(usual | settings)))
    metadata = folder / "hwrl_card-3.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hwrl-card\nVersion: 3.1\n")
    (metadata / "entry_points.txt").write_text("[hwrl.backends]\ncard = hwrl_card\n")


def doctor(*options: str, folder: Path | None = None, choose: str = "") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"HWRL_BACKEND": choose, "PYTHONPATH": str(folder or ""), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [HWRL, "doctor", *options], env=env, text=True, capture_output=True, timeout=1200, check=False
    )
