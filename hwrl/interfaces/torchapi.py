"""Which functions this torch offers for a device: the one place that asks, for torches and vendors differ.

``torch.accelerator`` is general, and serves the one device for which torch was built or extended; a device's own module
(``torch.<device>``) has what its vendor gave it. Imports torch inside functions only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from hwrl.errors import UnsupportedError

_NOT_GIVEN = ("is not a DeviceAllocator", "doesn't support", "not implemented")
"""With which words torch 2.13 says that a vendor's extension lacks what torch.accelerator rests on."""


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


def function(device_type: str, name: str, *, general: str = "") -> Callable[..., Any]:
    """Return the function ``name`` of the device's module; if it has none, torch.accelerator's ``general``.

    The module comes first, because torch.accelerator has each function for every device, whether or not the vendor gave
    what it rests on. Raises UnsupportedError if there is neither, and so does the function if torch says that the
    vendor did not give it.
    """
    import torch

    found: Callable[..., Any]
    module = device_module(device_type)
    if hasattr(module, name):
        found = getattr(module, name)
        return found
    if general and _serves(device_type) and hasattr(torch.accelerator, general):
        return functools.partial(_ask, device_type, name, getattr(torch.accelerator, general))
    raise _missing(
        device_type,
        name,
        why=f"torch {torch.__version__} has no torch.{device_type}.{name} and "
        f"no torch.accelerator.{general or name} for it",
    )


def _serves(device_type: str) -> bool:
    import torch

    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and accelerator.type == device_type


def _ask(device_type: str, name: str, call: Callable[..., Any], *args: Any) -> Any:
    try:
        return call(*args)
    except RuntimeError as exc:
        said = str(exc).strip().partition("\n")[0]
        if isinstance(exc, NotImplementedError) or any(words in said for words in _NOT_GIVEN):
            raise _missing(
                device_type, name, why=f"torch.{device_type} does not have it, and torch says: {said}"
            ) from exc
        raise


def _missing(device_type: str, name: str, *, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"device {device_type!r} has no {name}",
        why=why,
        fix="use a torch extension that has it, or override the method of Backend that needs it",
    )
