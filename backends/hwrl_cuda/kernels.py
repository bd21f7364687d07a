"""Fused operations of Liger Kernel, if it is installed: https://github.com/linkedin/Liger-Kernel."""

from __future__ import annotations

from typing import Any

import torch
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction

_OFFSET, _CASTING, _IN_PLACE = 0.0, "llama", False  # in place, the gradient of x would overwrite that of the result


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight; see :class:`hwrl.interfaces.Kernels`."""
    out: Any = LigerRMSNormFunction.apply(x, weight, eps, _OFFSET, _CASTING, _IN_PLACE)
    assert isinstance(out, torch.Tensor)
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; see :class:`hwrl.interfaces.Kernels`."""
    out: Any = LigerSiLUMulFunction.apply(gate, up)
    assert isinstance(out, torch.Tensor)
    return out
