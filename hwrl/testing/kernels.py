"""A backend's fused operations on a device, against their definitions in double precision on the host."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hwrl.interfaces import Backend
from hwrl.testing.compute import differences, with_gradients

ROWS = {"a row": (1, 64), "tokens": (37, 128), "heads": (5, 4, 96), "an odd width": (3, 200)}
"""Shapes of the inputs, in models' layers."""
_EPS = 1e-6
_Operation = Callable[..., torch.Tensor]


def wrong_rms_norm(backend: Backend, rms_norm: _Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``rms_norm`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator)
    x[..., ::2, :] *= 1e-3  # so small that eps changes the result in these rows
    weight = 1 + torch.randn(shape[-1], generator=generator) / 4

    def defined(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + _EPS).sqrt() * weight

    inputs = {"x": x.to(dtype), "weight": weight.to(dtype)}
    return _errors(backend, lambda x, weight: rms_norm(x, weight, _EPS), defined, inputs)


def wrong_swiglu(backend: Backend, swiglu: _Operation, shape: tuple[int, ...], dtype: torch.dtype) -> list[str]:
    """Return the errors of ``swiglu`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    inputs = {name: (2 * torch.randn(shape, generator=generator)).to(dtype) for name in ("gate", "up")}
    return _errors(backend, swiglu, lambda gate, up: gate / (1 + (-gate).exp()) * up, inputs)


def _errors(backend: Backend, fused: _Operation, defined: _Operation, inputs: dict[str, torch.Tensor]) -> list[str]:
    first = next(iter(inputs.values()))
    weight = torch.randn(first.shape, generator=torch.Generator().manual_seed(1)).to(first.dtype)
    found = {name: tensor.to(backend.device(), copy=True).requires_grad_() for name, tensor in inputs.items()}
    out = fused(*found.values())
    if (out.shape, out.dtype) != (first.shape, first.dtype):
        return [f"it returned {tuple(out.shape)} in {out.dtype}, and not {tuple(first.shape)} in {first.dtype}"]
    out = out.clone()  # the operation may free or overwrite its own result in the backward pass
    out.backward(weight.to(backend.device()))
    exact = {name: tensor.double().requires_grad_() for name, tensor in inputs.items()}
    right = defined(*exact.values())
    right.backward(weight.double())
    return list(differences(with_gradients(out, found), with_gradients(right, exact), first.dtype))
