"""The fused operations of a backend: :class:`Kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    _RmsNorm = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    _Swiglu = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
else:
    _RmsNorm = _Swiglu = Callable  # the registry reads these types where torch may not be importable


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """Fused operations for a transformer's layers. An operation is None if the backend does not have it.

    ``rms_norm(x, weight, eps)`` returns x · (mean of x² over the last dimension + eps) ** -0.5 · weight, in the shape
    and dtype of ``x``; ``weight`` has one dimension, the last of ``x``, and the same dtype. ``swiglu(gate, up)``
    returns silu(gate) · up; all three have the same shape and dtype. Both compute in float32 inside. Tensors are on
    the device; gradients flow to each of them. In its backward pass, ``swiglu`` may overwrite its inputs.
    """

    rms_norm: _RmsNorm | None = None
    swiglu: _Swiglu | None = None
