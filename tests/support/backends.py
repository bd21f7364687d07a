"""Which backends run on this machine."""

from __future__ import annotations

import os

from hwrl.discovery import Registry
from hwrl.errors import BackendError


def runs_here(name: str) -> bool:
    """Return whether a process with ``HWRL_BACKEND=name`` gets a backend."""
    try:
        Registry(env=os.environ | {"HWRL_BACKEND": name}).choose()
    except BackendError:
        return False
    return True
