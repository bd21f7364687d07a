"""FLOPs of models, against numbers worked out by hand from their architectures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GraniteMoeConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

from hwrl.train.flops import ModelFlops, count_flops

QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True}
QWEN3_1_7B = Qwen3Config(
    hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, intermediate_size=6144, **QWEN3
)
QWEN3_4B = Qwen3Config(hidden_size=2560, num_hidden_layers=36, num_attention_heads=32, intermediate_size=9728, **QWEN3)


def flops_of(config: Any, *, frozen: bool = False) -> ModelFlops:
    with torch.device("meta"):
        return count_flops(AutoModelForCausalLM.from_config(config), frozen=frozen)


def by_hand(layers: int, hidden: int, heads: int, inner: int) -> int:
    """Return the parameters of a Qwen3's layers: queries and output, keys and values, the gated MLP, and norms."""
    matrices = 2 * hidden * heads * 128 + 2 * hidden * 8 * 128 + 3 * hidden * inner
    return layers * (matrices + 2 * hidden + 2 * 128) + hidden


@pytest.mark.parametrize(
    ("config", "parameters", "output", "width"),
    [
        (QWEN3_1_7B, by_hand(28, 2048, 16, 6144), 2048 * 151936, 28 * 16 * 128),
        (QWEN3_4B, by_hand(36, 2560, 32, 9728), 2560 * 151936, 36 * 32 * 128),
    ],
    ids=["1.7B", "4B"],
)
def test_a_model_costs_what_its_architecture_says(config: Any, parameters: int, output: int, width: int) -> None:
    flops = flops_of(config)
    assert flops == ModelFlops(layer_parameters=parameters, output_parameters=output, full_width=width)
    lengths, responses = np.array([1000, 128]), np.array([900, 0])
    wanted = [6 * (parameters * 1000 + output * 900 + width * 1000**2), 6 * (parameters * 128 + width * 128**2)]
    assert flops.training(lengths, responses=responses).tolist() == wanted
    assert (flops.forward(lengths, responses=responses) * 3).tolist() == wanted


def test_an_adapters_frozen_model_has_no_gradients_of_weights() -> None:
    flops = flops_of(QWEN3_1_7B, frozen=True)
    lengths = np.array([1000])
    whole = flops_of(QWEN3_1_7B).training(lengths, responses=lengths)[0]
    products = flops.layer_parameters * 1000 + flops.output_parameters * 1000
    assert flops.training(lengths, responses=lengths)[0] == whole - 2 * products


def test_a_token_meets_the_active_experts_only() -> None:
    config = Qwen3MoeConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=48,
        num_experts=16,
        num_experts_per_tok=2,
        vocab_size=100,
    )
    attention = 2 * 64 * 4 * 32 + 2 * 64 * 2 * 32 + 2 * 32
    assert flops_of(config).layer_parameters == 2 * (attention + 64 * 16 + 2 * 3 * 64 * 48 + 2 * 64) + 64


def test_experts_count_by_their_number_whatever_their_layer_is_called() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 100}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = GraniteMoeConfig(**sizes, **heads, num_local_experts=16, num_experts_per_tok=2)
    attention = 2 * 64 * 64 + 2 * 64 * 32
    assert flops_of(config).layer_parameters == 2 * (attention + 64 * 16 + 2 * 3 * 64 * 48 + 2 * 64) + 64


def test_a_class_of_experts_may_have_none() -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    dense = flops_of(Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8))
    config = Qwen3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_local_experts=0)
    assert flops_of(config) == dense


def test_attention_in_a_window_looks_back_no_further() -> None:
    config = MistralConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, sliding_window=100
    )
    flops, rows = flops_of(config), np.array([80, 300])
    none = np.zeros(2, dtype=np.int64)
    attention = flops.training(rows, responses=none) - 6 * flops.layer_parameters * rows
    assert attention.tolist() == [6 * 2 * 64 * 80**2, 6 * 2 * 64 * (300**2 - 200**2)]


def test_tables_of_embeddings_cost_nothing() -> None:
    flops = flops_of(GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=30, n_positions=64))
    layer = (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8) + 4 * 8
    assert flops == ModelFlops(layer_parameters=2 * layer + 2 * 8, output_parameters=240, full_width=2 * 8)
