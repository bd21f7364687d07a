"""Plugins with faults as distributions that child processes find, too."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def installed(module: Path, entry_points: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Install ``module`` into ``folder`` as the distribution ``faulty``, with ``entry_points`` by group."""
    shutil.copy(module, folder)
    metadata = folder / "faulty-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty\nVersion: 1.0\n")
    lines = [f"[{group}]\nfaulty = {value}\n" for group, value in entry_points.items()]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield
    sys.modules.pop(module.stem, None)
