"""Small models for the Megatron engine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from hwrl.models import build_meta_model
from hwrl.run.demo import write_demo
from hwrl.saved_names import SavedNames

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 5e4,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 2.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen2-tied-with-padding": Qwen2Config(**{**SIZES, "head_dim": 8}, tie_word_embeddings=True, pad_token_id=7),
    "llama-without-groups": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=False),
    "llama-3-rope": LlamaConfig(**SIZES, tie_word_embeddings=True, rope_scaling=LLAMA_3_ROPE),
    "qwen3-experts": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True),
    "qwen3-experts-with-their-own-shares": Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=False),
}


def write_model(directory: Path, config: Any, *, dtype: torch.dtype = torch.float32, **saving: Any) -> Path:
    """Write a model with random weights, norms and biases included, and the demo's tokenizer."""
    write_demo(directory, seed=3, prompts=16)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        (directory / "model" / "model.safetensors").unlink()
        model.to(dtype).save_pretrained(directory / "model", **saving)
    return directory / "model"


def to_another_format(directory: Path) -> None:
    """Replace the safetensors files of a model by a file that cannot be read by parts."""
    files = list(directory.glob("*.safetensors"))
    whole = {name: tensor for path in files for name, tensor in load_file(path).items()}
    torch.save(whole, directory / "pytorch_model.bin")
    for path in [*files, *directory.glob("*.index.json")]:
        path.unlink()


def with_saved_names(directory: Path, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of the model in ``directory`` under the names in its files, experts one by one."""
    model = build_meta_model(directory, dtype=torch.float32)
    own, names = model.state_dict().keys(), SavedNames.of(model)
    divided = (names.parts(name, tensor) if name in own else [(name, tensor)] for name, tensor in weights.items())
    return {name: part for parts in divided for name, part in parts}
