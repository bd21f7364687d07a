"""Attention over sequences that lie end to end on a device, against a loop over tokens in double precision."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hwrl.interfaces import Backend
from hwrl.testing.compute import wrong_operation


@dataclass(frozen=True)
class Packed:
    """Sequences of these ``lengths``, end to end. The call's ``max_length`` is the longest plus ``spare``."""

    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 4
    head_size: int = 16
    spare: int = 0
    scale: float | None = None

    @property
    def tokens(self) -> int:
        """The number of tokens of all sequences."""
        return sum(self.lengths)

    @property
    def boundaries(self) -> list[int]:
        """0, and the end of each sequence: the values of ``cu_seqlens``."""
        return [0, *itertools.accumulate(self.lengths)]


PACKED = {
    "ragged": Packed((5, 1, 17, 9)),
    "one": Packed((23,)),
    "single tokens": Packed((1, 1, 4, 1)),
    "empty sequences": Packed((0, 7, 0, 0, 3, 0)),
    "padded boundaries": Packed((9, 6, 0, 0, 0), spare=23),
    "grouped": Packed((6, 13), heads=6, kv_heads=2, head_size=32),
    "one key head, own scale": Packed((12, 3), kv_heads=1, scale=0.4),
    "of similar lengths": Packed((80, 77, 80, 70), kv_heads=2, head_size=64),
    "large": Packed((130, 61), heads=2, kv_heads=1, head_size=64),
}
"""The packs of training, and their edges."""


def wrong_varlen(backend: Backend, pack: Packed, dtype: torch.dtype) -> list[str]:
    """Return the errors in the device's attention over ``pack`` and its gradients, one line each."""
    generator = torch.Generator().manual_seed(0)
    heads = {"query": pack.heads, "key": pack.kv_heads, "value": pack.kv_heads}
    drawn = {
        name: torch.randn(pack.tokens, count, pack.head_size, generator=generator).to(dtype)
        for name, count in heads.items()
    }
    cu_seqlens = torch.tensor(pack.boundaries, dtype=torch.int32, device=backend.device())
    fused = functools.partial(
        backend.varlen_attention,
        cu_seqlens=cu_seqlens,
        max_length=max(pack.lengths) + pack.spare,
        scale=pack.scale,
    )
    return wrong_operation(backend, fused, functools.partial(_token_by_token, pack=pack), drawn)


def why_not_fused(backend: Backend, dtype: torch.dtype) -> str:
    """Return how the device computes one long and many short sequences without a fused kernel, "" if with one.

    Without one, the sequences become rows of the longest one's length, or are computed one by one.
    """
    pack = Packed((256, *[1] * 63), head_size=64)
    query = torch.ones(pack.tokens, pack.heads, pack.head_size, dtype=dtype, device=backend.device())
    cu_seqlens = torch.tensor(pack.boundaries, dtype=torch.int32, device=backend.device())
    with torch.no_grad(), _Operations() as seen:
        backend.varlen_attention(query, query, query, cu_seqlens=cu_seqlens, max_length=256)
    if seen.most_elements >= len(pack.lengths) * 256 * pack.heads * pack.head_size:
        return "it pads the sequences to the longest"
    return f"it takes {seen.count} operations" if seen.count >= len(pack.lengths) else ""


class _Operations(TorchDispatchMode):
    """Counts torch's operations in the block, and the elements of the largest result."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.count = self.most_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count += 1
        for one in out if isinstance(out, tuple | list) else [out]:
            if isinstance(one, torch.Tensor):
                self.most_elements = max(self.most_elements, one.numel())
        return out


def _token_by_token(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, pack: Packed) -> torch.Tensor:
    scale = 1 / math.sqrt(pack.head_size) if pack.scale is None else pack.scale
    shared = pack.heads // pack.kv_heads
    rows = []
    for begin, end in itertools.pairwise(pack.boundaries):
        for token, head in itertools.product(range(begin, end), range(pack.heads)):
            seen = slice(begin, token + 1), head // shared
            weights = torch.exp(key[seen] @ query[token, head] * scale)
            rows.append(weights @ value[seen] / weights.sum())
    return torch.stack(rows).reshape(pack.tokens, pack.heads, pack.head_size)
