"""Attention over packed sequences, by torch's fused kernel (torch.nn.attention.varlen)."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

_DTYPES = (torch.bfloat16, torch.float16)
_HEAD_DIM, _HEAD_DIM_STEP = 256, 8
_CAPABILITY = (8, 0)
_PARAMETERS = frozenset(inspect.signature(varlen_attn).parameters)
_CAUSAL: dict[str, Any] = (
    {"window_size": (-1, 0)} if "window_size" in _PARAMETERS else {"is_causal": True}  # torch 2.11 and later; 2.10
)


def why_not() -> str:
    """Return the reason why this process cannot use the kernel; or ``''``."""
    if not _CAUSAL.keys() <= _PARAMETERS:
        return f"torch {torch.__version__} has a varlen_attn with other arguments: {', '.join(sorted(_PARAMETERS))}"
    capability = torch.cuda.get_device_capability() if torch.cuda.device_count() else _CAPABILITY
    if capability < _CAPABILITY:
        return f"the kernel needs compute capability 8.0, and this device has {capability[0]}.{capability[1]}"
    return ""


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``tensors`` in autocast's dtype if autocast is on: autocast does not cast for this kernel."""
    if not torch.is_autocast_enabled("cuda"):
        return tensors
    dtype = torch.get_autocast_dtype("cuda")
    return tuple(tensor.to(dtype) for tensor in tensors)


def takes(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Return whether the kernel runs here, and supports this dtype and head size."""
    size = query.shape[-1]
    return _RUNS and query.dtype in _DTYPES and size == value.shape[-1] <= _HEAD_DIM and size % _HEAD_DIM_STEP == 0


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scale: float | None,
) -> torch.Tensor:
    """Return the attention; see :meth:`hwrl.Backend.varlen_attention`."""
    options = dict(_CAUSAL)
    if scale is not None and "scale" in _PARAMETERS:
        options["scale"] = scale
    elif scale is not None:  # torch 2.10
        query = query * (scale * math.sqrt(query.shape[-1]))
    if "enable_gqa" in _PARAMETERS:  # before torch 2.12 the kernel shares heads without being told
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    out: Any = varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, **options)
    assert isinstance(out, torch.Tensor)  # a pair only if asked for
    return out


_RUNS = not why_not()
"""Read by traced code, where a call would break the graph."""
