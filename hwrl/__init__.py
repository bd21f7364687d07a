"""hwrl: one reinforcement-learning pipeline on any accelerator.

Importing hwrl is free: it loads no torch, no backend and no vendor library. Names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwrl.discovery.hookspecs import hookimpl as hookimpl
    from hwrl.discovery.registry import get_backend as get_backend
    from hwrl.discovery.registry import set_backend as set_backend
    from hwrl.errors import HwrlError as HwrlError
    from hwrl.interfaces.backend import Backend as Backend
    from hwrl.interfaces.backend import BackendInfo as BackendInfo
    from hwrl.interfaces.backend import Capability as Capability
    from hwrl.interfaces.backend import ProbeContext as ProbeContext
    from hwrl.interfaces.backend import ProbeResult as ProbeResult

_HOME = {
    "Backend": "hwrl.interfaces.backend",
    "BackendInfo": "hwrl.interfaces.backend",
    "Capability": "hwrl.interfaces.backend",
    "HwrlError": "hwrl.errors",
    "ProbeContext": "hwrl.interfaces.backend",
    "ProbeResult": "hwrl.interfaces.backend",
    "get_backend": "hwrl.discovery.registry",
    "hookimpl": "hwrl.discovery.hookspecs",
    "set_backend": "hwrl.discovery.registry",
}

__all__ = [*sorted(_HOME), "__version__"]  # noqa: PLE0604 - every element is a string; the table is the one source


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hwrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
