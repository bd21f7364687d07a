"""Fused operations of torch_npu."""

from __future__ import annotations

import torch
import torch_npu


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / rms(x) * weight; see :class:`hwrl.interfaces.Kernels`."""
    out: torch.Tensor = torch_npu.npu_rms_norm(x, weight, epsilon=eps)[0]
    return out


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up; see :class:`hwrl.interfaces.Kernels`."""
    out: torch.Tensor = torch_npu.npu_swiglu(torch.cat((gate, up), -1), dim=-1)
    return out
