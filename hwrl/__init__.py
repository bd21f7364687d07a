"""hwrl: one reinforcement-learning pipeline on any accelerator.

Importing hwrl is free: it loads no torch, no backend and no vendor library. Names below are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl.lazy import lazy_face

__version__ = "0.2.0"

if TYPE_CHECKING:
    from hwrl.discovery import get_backend as get_backend
    from hwrl.discovery import hookimpl as hookimpl
    from hwrl.discovery import set_backend as set_backend
    from hwrl.errors import HwrlError as HwrlError
    from hwrl.interfaces import Backend as Backend
    from hwrl.interfaces import BackendInfo as BackendInfo
    from hwrl.interfaces import Capability as Capability
    from hwrl.interfaces import ProbeContext as ProbeContext
    from hwrl.interfaces import ProbeResult as ProbeResult

__getattr__, __dir__, __all__ = lazy_face(__name__)
__all__ += ["__version__"]
