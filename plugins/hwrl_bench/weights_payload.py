"""The tensors of ``hwrl bench weights``, on a device and with values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch

from hwrl.comm import raw_bytes
from hwrl.saved_names import SavedNames
from hwrl.weights import WeightLayout
from hwrl_bench.payloads import DESCRIPTIONS, MIXTURES

Tensors = Mapping[str, torch.Tensor]


class BenchPayload:
    """The named tensors of one process on its device; every process starts with the same values.

    ``flat`` is one storage for all tensors, and ``views`` are the tensors in it.
    """

    def __init__(self, model: str, *, nbytes: int, layers: int, device: torch.device) -> None:
        self.device = device
        self._whole, self.named = _tensors(model, nbytes=nbytes, layers=layers, device=device)
        self.layout = WeightLayout.plan(self.named, flat=True)
        self.flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.views = self.layout.views(self.flat)

    @cached_property
    def copies(self) -> Tensors:
        """One contiguous tensor for each tensor, with its own storage. The first use allocates."""
        return {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in self.named}

    def change(self) -> None:
        """Give the tensors other values, the same in every process.

        The values of 256 changes in a row differ in every byte: no way finds what an earlier way received.
        """
        for tensor in self._whole:
            raw_bytes(tensor).add_(1)

    def copy_into(self, target: Tensors) -> None:
        """Copy the tensors into those of the same names."""
        for name, tensor in self.named:
            target[name].copy_(tensor)

    def is_equal(self, received: Tensors) -> bool:
        """Return whether the received tensors and this process's tensors have the same bits."""
        return all(
            torch.equal(raw_bytes(received[name].contiguous()), raw_bytes(tensor.contiguous()))
            for name, tensor in self.named
        )


def _tensors(
    model: str, *, nbytes: int, layers: int, device: torch.device
) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Return contiguous tensors with values, and the tensors to send: some are views of those."""
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    names: SavedNames | None = None
    if model in MIXTURES:
        meta = _mixture(MIXTURES[model], layers)
        names = SavedNames.of(meta)
        described = [(name, tuple(one.shape), one.dtype) for name, one in meta.named_parameters()]
    else:
        described = [(name, shape, getattr(torch, dtype)) for name, shape, dtype in DESCRIPTIONS[model](nbytes)]
    named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in described]
    for number, (_, tensor) in enumerate(named):
        for part in raw_bytes(tensor).split(len(noise) - 4096):
            part.copy_(noise[number % 4096 :][: len(part)])
    whole = [tensor for _, tensor in named]
    if names is not None:
        return whole, list(names.all_parts(named))
    changed = {"transposed": lambda tensor: tensor.T, "strided": lambda tensor: tensor[:, ::2]}
    named = [(name, changed[name](tensor) if name in changed else tensor) for name, tensor in named]
    return whole, [*named, ("tied", named[0][1])] if model == "awkward" else named


def _mixture(sizes: Mapping[str, int], layers: int) -> Any:
    """Return a model on the meta device, whose parameters hold all experts of a layer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING["qwen3_moe"](
        **sizes, num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)
