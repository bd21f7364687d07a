"""hwrl: one reinforcement-learning pipeline on any accelerator.

Importing hwrl is free: it loads no torch, no backend and no vendor library. Names below are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from hwrl.backend import Backend as Backend
    from hwrl.backend import BackendInfo as BackendInfo
    from hwrl.backend import Capability as Capability
    from hwrl.backend import ProbeContext as ProbeContext
    from hwrl.backend import ProbeResult as ProbeResult
    from hwrl.errors import HwrlError as HwrlError
    from hwrl.hookspecs import hookimpl as hookimpl
    from hwrl.registry import get_backend as get_backend
    from hwrl.registry import set_backend as set_backend

_HOME = {
    "Backend": "hwrl.backend",
    "BackendInfo": "hwrl.backend",
    "Capability": "hwrl.backend",
    "HwrlError": "hwrl.errors",
    "ProbeContext": "hwrl.backend",
    "ProbeResult": "hwrl.backend",
    "get_backend": "hwrl.registry",
    "hookimpl": "hwrl.hookspecs",
    "set_backend": "hwrl.registry",
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
