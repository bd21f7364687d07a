"""The device of a benchmark: its name, and the most memory in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hwrl import Capability

if TYPE_CHECKING:
    from hwrl import Backend


def device_name(backend: Backend) -> str:
    """Return torch's name of the current device; its type and number if torch has no name."""
    properties = getattr(backend.device_module, "get_device_properties", None)
    return str(backend.device()) if properties is None else str(properties(backend.current_index()).name)


def reset_peak(backend: Backend) -> bool:
    """Start a new peak of memory in use, because a loader may use more than a step. Return False if torch cannot."""
    reset = getattr(backend.device_module, "reset_peak_memory_stats", None)
    if reset is not None:
        reset()
    return reset is not None


def peak_nbytes(backend: Backend) -> int | None:
    """Return the peak of bytes in use since :func:`reset_peak`; None if the backend does not count them."""
    usable = backend.supports(Capability.MEMORY_STATS).usable
    return backend.memory_info().peak_nbytes if usable else None
