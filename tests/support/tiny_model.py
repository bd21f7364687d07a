"""A tiny model, requests of it, and their responses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hwrl.interfaces import GenerationRequest, Response, Sampling
from hwrl.rollout import EmbeddedEngine

END = 1


def tiny_model(seed: int = 0, *, tied: bool = False, experts: int = 0, vocabulary: int = 16) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        "qwen3_moe" if experts else "qwen3",
        **({"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24} if experts else {}),
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,  # far from uniform, so that a wrong position or mask changes the greedy token
        tie_word_embeddings=tied,
        eos_token_id=END,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config)


def requests_of(count: int, *, temperature: float, longest: int = 12, seed: int = 0) -> list[GenerationRequest]:
    rng = np.random.default_rng(seed)
    return [
        GenerationRequest(
            request_id=index,
            prompt_ids=rng.integers(2, 16, size=int(rng.integers(1, longest))).astype(np.int32),
            sampling=Sampling(int(rng.integers(1, longest)), temperature),
        )
        for index in range(count)
    ]


def generate(engine: EmbeddedEngine, requests: Sequence[GenerationRequest]) -> dict[int, Response]:
    engine.submit(requests)
    responses = {}
    while engine.pending():
        responses.update({done.request_id: done.response for done in engine.step()})
    return responses
