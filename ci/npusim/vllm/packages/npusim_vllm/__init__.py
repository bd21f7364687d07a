"""What vllm-ascend asks of the device beside CANN's operators: ATB's, and a Triton kernel. vLLM calls :func:`simulate`
in each of its processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch_npu  # noqa: F401 - registers ATB's operators

_atb = torch.library.Library("atb", "IMPL")


def simulate() -> None:
    """Put the operators below in the place of those that need device code."""
    from vllm_ascend.ops.triton import compute_slot_mapping

    for function in (_npu_rotary_embedding, _npu_matmul_add_fp32):
        if function not in _simulated:
            _simulated.append(function)
            _atb.impl(function.__name__, function, "PrivateUse1", allow_override=True)
    for module in (compute_slot_mapping, sys.modules.get("vllm_ascend.worker.block_table")):
        if module is not None:
            module._compute_slot_mapping_kernel = Kernel(slot_mapping)


_simulated: list[Callable[..., None]] = []


class Kernel:
    """A function with the launch syntax of a Triton kernel: ``kernel[grid](...)``."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self._function


def slot_mapping(
    tokens: int,
    room: int,
    starts: torch.Tensor,
    positions: torch.Tensor,
    blocks: torch.Tensor,
    stride: int,
    block_size: int,
    slots: torch.Tensor,
    *,
    TOTAL_CP_WORLD_SIZE: int,
    PAD_ID: int,
    **tiles: int,
) -> None:
    """Write each token's slot in the attention cache: the place in its block, by the block table of its request."""
    if TOTAL_CP_WORLD_SIZE != 1:
        raise NotImplementedError("npusim: the slots of context parallelism are not simulated")
    ends = starts[1 : len(blocks) + 1].cpu()
    used = int(ends.max())
    request = torch.searchsorted(ends, torch.arange(used, dtype=ends.dtype), right=True).to(slots.device)
    position = positions[:used]
    block = blocks[request, position // block_size]
    slots[:used] = (block * block_size + position % block_size).to(slots.dtype)
    slots[tokens:room] = PAD_ID


def _npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cache: torch.Tensor,
    neox: bool,  # noqa: FBT001 - the operator's signature
) -> None:
    """Rotate each head of ``query`` and ``key`` in place. The rows of ``cache`` have cosines, then sines."""
    cos, sin = cache.index_select(0, positions.flatten()).float()[:, None].chunk(2, -1)
    for tensor in (query, key):
        heads = tensor.view(len(cos), -1, head_size)
        first, second = heads.float().chunk(2, -1) if neox else (heads[..., ::2].float(), heads[..., 1::2].float())
        parts: Any = (first * cos - second * sin, second * cos + first * sin)
        heads.copy_(torch.cat(parts, -1) if neox else torch.stack(parts, -1).flatten(-2))


def _npu_matmul_add_fp32(left: torch.Tensor, right: torch.Tensor, total: torch.Tensor) -> None:
    """Add the product of ``left``, transposed, and ``right`` to ``total``, which is float32."""
    total.add_(left.float().T @ right.float())
