"""Look up torch's functions for a device. They differ by torch version and by vendor; only this module looks them up.

``torch.accelerator`` comes first: it is general, and serves one device, the one for which torch was built or extended.
A device's own module (``torch.<device>``) has the vendor's functions. This module imports torch inside functions only.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hwrl.errors import UnsupportedError

if TYPE_CHECKING:
    import torch

    from hwrl.interfaces.backend import Backend

_GAP_MESSAGES = ("is not a DeviceAllocator", "doesn't support", "not implemented")
"""torch 2.13's messages when a vendor's extension does not implement a function of torch.accelerator."""

_SILENT = ("empty_cache", "memory_stats")
"""Functions of torch.accelerator that do nothing while torch's general allocator is not in use. This is so before torch
2.12 if the vendor's extension has its own allocator."""


def device_module(device_type: str) -> Any:
    """Return torch's module for the device; raise UnsupportedError if torch does not know it."""
    import torch

    try:
        return torch.get_device_module(device_type)
    except (RuntimeError, AttributeError) as exc:
        raise UnsupportedError(
            f"torch has no device {device_type!r}",
            why=str(exc).strip().partition("\n")[0],
            fix="import the vendor's torch extension in hwrl_create_backend, after torch itself",
        ) from exc


def function(device_type: str, name: str, *, general: str = "", instead: str = "") -> Callable[..., Any]:
    """Return a function of the device: torch.accelerator's ``general``, or else ``name`` of the device's module.

    A module without ``name`` is replaced by torch.accelerator's ``instead``. torch.accelerator's function may exist
    while the vendor's extension lacks its implementation. Then the returned function calls the module's. Raises
    UnsupportedError if there is neither; the returned function raises it, too.
    """
    import torch

    own: Callable[..., Any] | None = getattr(device_module(device_type), name, None)
    if general and _serves(device_type) and hasattr(torch.accelerator, general):
        return functools.partial(_call_accelerator, device_type, name, getattr(torch.accelerator, general), own)
    if own is not None:
        return own
    if instead and _serves(device_type):
        found: Callable[..., Any] = getattr(torch.accelerator, instead)
        return found
    raise _missing(
        device_type,
        name,
        why=f"torch {torch.__version__} has no torch.{device_type}.{name} and "
        f"no torch.accelerator.{general or instead or name} for it",
    )


def new_event(device_type: str, *, timing: bool) -> Any:
    """Return a ``torch.Event`` of the device."""
    return _own_class("Event")(device_type, enable_timing=timing)


def new_stream(device: torch.device) -> Any:
    """Return a new ``torch.Stream`` of the device."""
    return _own_class("Stream")(device=device)


def _own_class(name: str) -> Any:
    """Return torch's own class ``name``, which it defines in C.

    Vendors' extensions and engines replace ``torch.Event`` and ``torch.Stream`` for the whole process, by classes with
    other arguments, or by subclasses that torch refuses.
    """
    import torch

    return getattr(torch._C, name)


def require_streams(device_type: str) -> None:
    """Raise UnsupportedError if torch has no streams for the device."""
    why = _why_no_streams(device_type)
    if why:
        raise UnsupportedError(
            f"device {device_type!r} has no streams",
            why=why,
            fix="let the backend's stream, current_stream and event return inline ones, as hwrl_cpu/inline.py does",
        )


@functools.cache
def _why_no_streams(device_type: str) -> str:
    """Return torch's error when an event is recorded: torch makes streams and events also where none work."""
    try:
        new_event(device_type, timing=False).record()
    except RuntimeError as exc:
        return str(exc).strip().partition("\n")[0]
    return ""


def pinned_empty(device_type: str, nbytes: int) -> Any:
    """Return new page-locked host memory, a uint8 tensor. Raises UnsupportedError if torch cannot lock memory."""
    import torch

    why = "torch returned memory that is not page-locked"
    try:
        memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if not nbytes or memory.is_pinned():
            return memory
    except RuntimeError as exc:
        why = str(exc).strip().partition("\n")[0]
    raise UnsupportedError(
        f"device {device_type!r} has no page-locked host memory",
        why=why,
        fix="override the backend's pinned_empty, with usual memory if copies may block",
    )


def fill_stream_functions(backend: Backend) -> None:
    """Add the backend's streams and events to the device's module where it lacks them: FSDP2 calls them there."""
    own: dict[str, Callable[..., Any]] = {
        "Stream": lambda **_: backend.stream(),
        "Event": lambda enable_timing=False, **_: backend.event(timing=enable_timing),
        "current_stream": lambda device=None: backend.current_stream(),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
    }
    for name, call in own.items():
        if not hasattr(backend.device_module, name):
            setattr(backend.device_module, name, call)


def _serves(device_type: str) -> bool:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


def _has_general_allocator() -> bool:
    import torch

    return bool(torch._C._accelerator_isAllocatorInitialized())


def _call_accelerator(
    device_type: str, name: str, call: Callable[..., Any], own: Callable[..., Any] | None, *args: Any
) -> Any:
    try:
        if own is not None and name in _SILENT and not _has_general_allocator():
            return own(*args)
        return call(*args)
    except RuntimeError as exc:
        message = str(exc).strip().partition("\n")[0]
        if not isinstance(exc, NotImplementedError) and not any(part in message for part in _GAP_MESSAGES):
            raise
        if own is not None:
            return own(*args)
        raise _missing(
            device_type, name, why=f"torch.{device_type} does not have it, and torch says: {message}"
        ) from exc


def _missing(device_type: str, name: str, *, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"device {device_type!r} has no {name}",
        why=why,
        fix="use a torch extension that has it, or override the method of Backend",
    )
