"""Causal attention over packed sequences, by torch's ordinary attention over padded rows: for any device of torch.

This module imports torch inside functions.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class PaddedAttention:
    """Copies the sequences into padded rows, attends in each row, and copies the results back.

    It computes (sequences × longest²) scores instead of the sum of length². It caches the places for the last
    ``cu_seqlens``, because all layers of a model share it. ``grouped``: torch has a fused kernel for grouped-query
    attention; if not, the key heads are repeated. Any thread may call it.
    """

    def __init__(self, *, grouped: bool) -> None:
        self._grouped = grouped
        self._known: tuple[weakref.ref[torch.Tensor], int, int, int, torch.Tensor] | None = None

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        cu_seqlens: torch.Tensor,
        max_length: int,
        scale: float | None,
    ) -> torch.Tensor:
        """Return the attention; see :meth:`~hwrl.Backend.varlen_attention`."""
        from torch.nn import functional

        places = self._places(cu_seqlens, len(query), max_length)
        rows = cu_seqlens.shape[0] - 1
        shared = query.shape[1] // key.shape[1]
        if shared > 1 and not self._grouped:
            key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        query, key, value = (_to_rows(each, places, rows, max_length) for each in (query, key, value))
        grouped = query.shape[1] != key.shape[1]
        out = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=grouped
        )
        return out.transpose(1, 2).flatten(0, 1).index_select(0, places)

    def _places(self, cu_seqlens: torch.Tensor, tokens: int, max_length: int) -> torch.Tensor:
        import torch

        # No cache here: a compiled graph must compute the places anew, and a backward pass cannot use a tensor of
        # inference mode.
        if torch.compiler.is_compiling() or torch.is_inference_mode_enabled():
            return _row_places(cu_seqlens, tokens, max_length)
        key = (0 if cu_seqlens.is_inference() else cu_seqlens._version, tokens, max_length)
        known = self._known  # read once: another thread may replace it
        if known is None or known[0]() is not cu_seqlens or known[1:4] != key:
            known = self._known = (weakref.ref(cu_seqlens), *key, _row_places(cu_seqlens, tokens, max_length))
        return known[-1]


def _row_places(cu_seqlens: torch.Tensor, tokens: int, max_length: int) -> torch.Tensor:
    """Return each token's place (int64) in the padded rows, seen as one row."""
    import torch

    token = torch.arange(tokens, device=cu_seqlens.device)
    row = (token[:, None] >= cu_seqlens[1:]).sum(1)  # the number of sequences that end before it
    return row * max_length + token - cu_seqlens[row]


def _to_rows(packed: torch.Tensor, places: torch.Tensor, rows: int, max_length: int) -> torch.Tensor:
    """Return ``packed`` (tokens, heads, head_dim) as (rows, heads, max_length, head_dim), with zeros as padding."""
    flat = packed.new_zeros(rows * max_length, *packed.shape[1:])
    return flat.index_copy(0, places, packed).view(rows, max_length, *packed.shape[1:]).transpose(1, 2)
