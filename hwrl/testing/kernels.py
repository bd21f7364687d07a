"""A backend's fused operations on a device, against their definitions in double precision on the host."""

from __future__ import annotations

import torch

from hwrl.interfaces import Backend
from hwrl.testing.compute import Operation, wrong_operation

ROWS = {"a row": (1, 64), "tokens": (37, 128), "heads": (5, 4, 96), "an odd width": (3, 200)}
"""Shapes of the inputs, in models' layers."""
_EPS = 1e-6


def wrong_rms_norm(backend: Backend, rms_norm: Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``rms_norm`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x[..., ::2, :] *= 1e-3  # so small that eps changes the result in these rows
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4

    def defined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight

    inputs = {"x": x.to(dtype), "weight": weight.to(dtype)}
    return wrong_operation(backend, lambda x, weight: rms_norm(x, weight, _EPS), defined, inputs)


def wrong_swiglu(backend: Backend, swiglu: Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``swiglu`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: (2 * torch.randn(shape, generator=generator)).to(dtype) for name in ("gate", "up")}
    return wrong_operation(backend, swiglu, lambda gate, up: gate / (1 + (-gate).exp()) * up, inputs)
