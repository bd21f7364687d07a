"""AdamW by the fastest implementation that works on the device: :func:`build_adamw`."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch


def build_adamw(parameters: Iterable[torch.Tensor], *, device: torch.device, **settings: Any) -> torch.optim.AdamW:
    """Return AdamW on ``parameters``: one kernel for all of them if the device has it, else torch's default."""
    if runs_fused(device.type):
        settings["fused"] = True
    return torch.optim.AdamW(parameters, **settings)


@functools.cache
def runs_fused(device_type: str) -> bool:
    """Return whether the fused AdamW takes a right step on the device; this takes one.

    torch names devices whose fused kernels may still be missing, so a name is not enough.
    """
    try:
        weight = torch.nn.Parameter(torch.ones(1, device=device_type))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=0.5, weight_decay=0.0, fused=True).step()
        return abs(weight.item() - 0.5) < 1e-3
    except (RuntimeError, NotImplementedError):
        return False
