"""Tiny models of several architectures that train in packs, with random weights far from uniform."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    Gemma3TextConfig,
    GPT2Config,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hwrl.models import attention_of

SIZES: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.4,  # far from uniform, so that a wrong position or boundary shows
    "pad_token_id": 0,
}
GPT2 = GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=48, n_positions=64, initializer_range=0.4)
PACKED: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "qwen2-tied": Qwen2Config(**{**SIZES, "head_dim": 8}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES),
    "gpt2": GPT2,
    "opt": OPTConfig(
        vocab_size=48, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    ),
    "mistral-without-window": MistralConfig(**SIZES, sliding_window=None),
    "gemma3-capped-logits": Gemma3TextConfig(**SIZES, final_logit_softcapping=2.0, layer_types=["full_attention"] * 2),
    "cohere-scaled-logits": CohereConfig(**{**SIZES, "head_dim": 8}, logit_scale=0.3),
    "granite-scaled-logits": GraniteConfig(**{**SIZES, "head_dim": 8}, logits_scaling=3.0),
}


def random_model(config: PretrainedConfig) -> Any:
    """Return a model of ``config``, always with the same weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config)).eval()


class Leaking(torch.nn.Module):
    """A layer whose tokens see the token before, in a pack also that of another row.

    With ``wraps`` the first token sees the last one.
    """

    def __init__(self, layer: torch.nn.Module, *, wraps: bool = False) -> None:
        super().__init__()
        self.layer, self.wraps = layer, wraps

    def forward(self, hidden: torch.Tensor, **inputs: Any) -> torch.Tensor:
        before = hidden.roll(1, 1)
        before[:, 0] *= self.wraps
        seen: torch.Tensor = self.layer(hidden + before, **inputs)
        return seen
