"""hwrl: one reinforcement-learning pipeline on any accelerator.

Importing hwrl is free: it loads no torch, no backend and no vendor library. Names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.2.0"

if TYPE_CHECKING:
    from hwrl.discovery import get_backend, hookimpl, set_backend
    from hwrl.errors import HwrlError
    from hwrl.interfaces import Backend, BackendInfo, Capability, ProbeContext, ProbeResult

_HOME = {
    "Backend": "hwrl.interfaces",
    "BackendInfo": "hwrl.interfaces",
    "Capability": "hwrl.interfaces",
    "HwrlError": "hwrl.errors",
    "ProbeContext": "hwrl.interfaces",
    "ProbeResult": "hwrl.interfaces",
    "get_backend": "hwrl.discovery",
    "hookimpl": "hwrl.discovery",
    "set_backend": "hwrl.discovery",
}

__all__ = [
    "Backend",
    "BackendInfo",
    "Capability",
    "HwrlError",
    "ProbeContext",
    "ProbeResult",
    "__version__",
    "get_backend",
    "hookimpl",
    "set_backend",
]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'hwrl' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
