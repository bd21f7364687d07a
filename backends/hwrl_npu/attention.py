"""Attention over packed sequences, by torch_npu's fused attention in its layout TND."""

from __future__ import annotations

import math
import weakref
from functools import cache

import torch
import torch_npu

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_SEQUENCES, _MAX_HEAD_DIM = 1024, 768  # by torch_npu 2.13's documentation of the operator
_MASK = 2048  # in this sparse_mode the operator wants a mask of this size, for sequences of any length
_CAUSAL_FROM_THE_END = 3  # sparse_mode; for as many queries as keys, this is the usual causal mask


def why_not() -> str:
    """Return the reason why this torch_npu has no such operator; or ``''``."""
    return "" if hasattr(torch_npu, "npu_fusion_attention") else "this torch_npu has no npu_fusion_attention"


def cast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return ``tensors`` in autocast's dtype if autocast is on: autocast does not cast for this operator."""
    if not torch.is_autocast_enabled("npu"):
        return tensors
    dtype = torch.get_autocast_dtype("npu")
    return tuple(tensor.to(dtype) for tensor in tensors)


def takes(query: torch.Tensor, value: torch.Tensor, sequences: int) -> bool:
    """Return whether the operator takes this dtype, this size of heads and this many sequences."""
    size = query.shape[-1]
    return (
        not torch.compiler.is_compiling()  # the operator wants the boundaries on the host
        and not why_not()
        and query.dtype in _DTYPES
        and size == value.shape[-1] <= _MAX_HEAD_DIM
        and sequences <= _MAX_SEQUENCES
    )


class FusedAttention:
    """Calls the operator, and caches the last boundaries on the host: all layers of a model share them."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[torch.Tensor], list[int]] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the attention; see :meth:`hwrl.Backend.varlen_attention`. Waits once for new boundaries."""
        ends = self._ends(cu_seqlens)
        out: torch.Tensor = torch_npu.npu_fusion_attention(
            query,
            key,
            value,
            query.shape[1],
            "TND",
            atten_mask=_mask(query.device),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else scale,
            actual_seq_qlen=ends,
            actual_seq_kvlen=ends,
            sparse_mode=_CAUSAL_FROM_THE_END,
        )[0]
        return out

    def _ends(self, cu_seqlens: torch.Tensor) -> list[int]:
        """Return the ends of the sequences, without the empty ones."""
        known = self._known  # read once: another thread may replace it
        if known is None or known[0]() is not cu_seqlens:
            known = self._known = weakref.ref(cu_seqlens), sorted({*cu_seqlens.tolist()} - {0})
        return known[1]


@cache
def _mask(device: torch.device) -> torch.Tensor:
    """Return the operator's mask: True where a query must not attend to a key."""
    return torch.ones(_MASK, _MASK, dtype=torch.bool, device=device).triu(1)
