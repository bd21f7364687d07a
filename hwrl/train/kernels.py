"""Run the layers of a transformers model on a backend's fused operations, where each proves itself first."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.func import functional_call

from hwrl.errors import in_one_line
from hwrl.interfaces import Kernels

_log = logging.getLogger("hwrl.train")

_TOKENS = 24
_TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The largest distance between two ways to compute a module, relative to the norm: a few roundings."""

_Forward = Callable[[torch.Tensor], torch.Tensor]


def apply_kernels(
    model: torch.nn.Module, kernels: Kernels, *, device: torch.device, dtype: torch.dtype, level: int = logging.WARNING
) -> int:
    """Replace the forward method of ``model``'s modules that ``kernels`` can compute; return their number.

    These are RMSNorms, and gated layers with SiLU. Before that, each kind of module runs with random parameters of its
    own shape on ``device`` in ``dtype``, forward and backward, in its own way and in the new way. If the results
    differ, or if the operation raises, modules of this kind stay as they are, and the log says so once, at ``level``.
    Parameters do not change, and may be on any device. Call it before the model is sharded. A compiler fuses by
    itself, so it needs no kernels.
    """
    why_not: dict[tuple[Any, ...], str] = {}
    replaced = 0
    for module in model.modules():
        forward = _fused_forward(module, kernels)
        if forward is None:
            continue
        kind = (type(module), *forward.args[1:], *(parameter.shape for parameter in module.parameters()))
        if kind not in why_not:
            why_not[kind] = _why_not(module, forward, device, dtype)
            if why_not[kind]:
                _log.log(level, "%s keeps its own forward method: %s", type(module).__name__, why_not[kind])
        if not why_not[kind]:
            module.forward = forward
            replaced += 1
    return replaced


def _fused_forward(module: torch.nn.Module, kernels: Kernels) -> partial[torch.Tensor] | None:
    """Return the new forward method for ``module``, or None if it does not look like one that ``kernels`` compute."""
    parts = {name for name, _ in module.named_children()}
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if len(inspect.signature(module.forward).parameters) != 1:
        return None
    shapes = {name: parameter.dim() for name, parameter in module.named_parameters(recurse=False)}
    is_norm = "RMSNorm" in type(module).__name__ and not parts and shapes == {"weight": 1}
    if kernels.rms_norm and isinstance(eps, float) and is_norm:
        return partial(_normalised, module, kernels.rms_norm, eps)
    if kernels.swiglu and {"gate_proj", "up_proj", "down_proj", "act_fn"} == parts:
        return partial(_gated, module, kernels.swiglu)
    return None


def _normalised(module: Any, rms_norm: Callable[..., torch.Tensor], eps: float, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != module.weight.dtype:  # in autocast
        own: torch.Tensor = type(module).forward(module, x)
        return own
    return rms_norm(x, module.weight, eps)


def _gated(module: Any, swiglu: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    down: torch.Tensor = module.down_proj(swiglu(module.gate_proj(x), module.up_proj(x)))
    return down


def _why_not(module: torch.nn.Module, forward: _Forward, device: torch.device, dtype: torch.dtype) -> str:
    """Return how ``forward`` differs from the module's own method on random parameters and inputs; or ``''``."""
    generator = torch.Generator(device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        values = torch.randn(shape, device=device, dtype=dtype, generator=generator)
        return values.mul_(shape[-1] ** -0.5 if len(shape) > 1 else 1.0).requires_grad_()

    parameters = {name: drawn(*parameter.shape) for name, parameter in module.named_parameters()}
    x = drawn(_TOKENS, next(module.parameters()).shape[-1])
    wanted = _results(module, parameters, x)
    own = vars(module).get("forward")
    module.forward = forward
    try:
        got = _results(module, parameters, x)
    except Exception as exc:  # noqa: BLE001 - a vendor's compiler raises its own exceptions
        return f"the backend's operation raised {in_one_line(exc)}"
    finally:
        del module.forward
        if own is not None:
            module.forward = own
    return _difference(got, wanted, _TOLERANCES.get(dtype, 0.0))


def _results(module: torch.nn.Module, parameters: dict[str, torch.Tensor], x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the module's output and all gradients."""
    out = functional_call(module, parameters, x)
    signs = torch.ones_like(out)
    signs[..., ::2] = -1.0  # the gradient of a plain sum would hide errors that cancel out
    gradients = torch.autograd.grad(out, [x, *parameters.values()], signs, allow_unused=True)
    names = ["the input", *parameters]
    return {"the output": out.detach()} | {
        f"the gradient of {name}": gradient
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None
    }


def _difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], tolerance: float) -> str:
    if got.keys() != wanted.keys():
        return f"the backend's operation gives {', '.join(got)}, and not {', '.join(wanted)}"
    for name, right in wanted.items():
        if (got[name].shape, got[name].dtype) != (right.shape, right.dtype):
            return f"{name} of the backend's operation has another shape or dtype"
        off = float((got[name].float() - right.float()).norm() / right.float().norm())
        if not off <= tolerance:  # also for NaN
            return f"{name} of the backend's operation is off by {off:.2g} of its norm, and {tolerance:g} is allowed"
    return ""
