"""Floating-point operations (FLOPs) of a training step, from the architecture of the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hwrl.models import build_model

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of one model, for rows of tokens, without embeddings, norms, activation functions and the loss.

    A token costs 2 FLOPs forward and 4 backward for each of ``layer_parameters`` (Kaplan et al. 2020,
    https://arxiv.org/abs/2001.08361 §2.1), and a response token the same for each of ``output_parameters``. Causal
    attention costs 2 · width · length² forward, and twice that backward (Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311 appendix B, without the future half). ``full_width`` is heads × head size, summed
    over the layers with full attention. ``window_width`` is the sum over those with a ``window`` of tokens.

    With ``frozen`` weights an adapter is trained: the weights have no gradient, so they cost 2 FLOPs backward. The
    adapter's own FLOPs are left out; they are about 1 %. Recomputation in activation checkpointing never counts.
    """

    layer_parameters: int
    output_parameters: int
    full_width: int
    window_width: int = 0
    window: int = 0
    frozen: bool = False

    def training(self, lengths: Counts, *, responses: Counts) -> Counts:
        """Return the FLOPs to train on each row. ``lengths`` counts tokens, ``responses`` those of the response."""
        return (4 if self.frozen else 6) * self._products(lengths, responses) + 6 * self._attention(lengths)

    def forward(self, lengths: Counts, *, responses: Counts) -> Counts:
        """Return the FLOPs of a forward pass of each row."""
        return 2 * (self._products(lengths, responses) + self._attention(lengths))

    def _products(self, lengths: Counts, responses: Counts) -> Counts:
        return self.layer_parameters * lengths + self.output_parameters * responses

    def _attention(self, lengths: Counts) -> Counts:
        beyond: Counts = np.maximum(lengths - self.window, 0)
        return self.full_width * lengths**2 + self.window_width * (lengths**2 - beyond**2)


def read_model_flops(directory: Path, *, frozen: bool) -> ModelFlops:
    """Return the FLOPs of the model in ``directory``. Reads its configuration only, and allocates no weights."""
    with torch.device("meta"):
        model = build_model(directory, dtype=torch.float32)
    return count_flops(model, frozen=frozen)


def count_flops(model: Any, *, frozen: bool = False) -> ModelFlops:
    """Return the FLOPs of ``model``, a transformers model on any device, also on the meta device.

    A token costs as many routed experts as the model's configuration says.
    """
    config = model.config.get_text_config()
    output = model.get_output_embeddings().weight
    outside = {id(output)} | {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    active, experts = _experts(config)
    inside = [(name, one) for name, one in model.named_parameters() if id(one) not in outside]
    routed = sum(
        one.numel()
        for name, one in inside
        if ".experts." in name or (experts > 1 and one.dim() > 2 and one.shape[0] == experts)
    )
    layers, window = _attention_layers(config)
    heads = getattr(config, "num_attention_heads", None) or 0
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(1, heads))
    return ModelFlops(
        layer_parameters=sum(one.numel() for _, one in inside) - routed + routed * active // experts,
        output_parameters=output.numel(),
        full_width=width * layers.count("full_attention"),
        window_width=width * layers.count("sliding_attention"),
        window=window,
        frozen=frozen,
    )


def _experts(config: Any) -> tuple[int, int]:
    """Return how many experts a token meets, and how many there are: (1, 1) without experts."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if experts := getattr(config, name, None):
            return int(getattr(config, "num_experts_per_tok", None) or 1), int(experts)
    return 1, 1


def _attention_layers(config: Any) -> tuple[list[str], int]:
    """Return the kind of attention of each layer, in transformers' words, and the size of the window in tokens."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["full_attention" if window is None else "sliding_attention"] * config.num_hidden_layers
    return list(kinds), int(window or 0)
