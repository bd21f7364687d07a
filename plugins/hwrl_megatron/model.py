"""A GPTModel for a Hugging Face directory."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from torch import nn

from hwrl.errors import ConfigError
from hwrl.interfaces import Backend
from hwrl.models import load_model_config
from hwrl_megatron.weights import head_size

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""The supported values of ``model_type`` in Hugging Face configurations."""


def build_gpt(directory: Path, *, backend: Backend, tensor_parallel: int, dtype: torch.dtype) -> GPTModel:
    """Return this rank's part of the model in ``directory``, on the host, with arbitrary weights.

    ``backend`` attends over packs. Initialize Megatron's parallel state first. Raises ConfigError for an unsupported
    model.
    """
    config = load_model_config(directory)
    _require_supported(config, tensor_parallel=tensor_parallel)
    layer = get_gpt_layer_local_spec(qk_layernorm=config.model_type == "qwen3", normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(TorchAttention, params={"backend": backend})
    model = GPTModel(
        _transformer_config(config, tensor_parallel=tensor_parallel, dtype=dtype),
        layer,
        vocab_size=config.vocab_size,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    if config.pad_token_id is not None:
        model.embedding.word_embeddings.register_forward_hook(functools.partial(_hold_padding, config.pad_token_id))
    return model


def _hold_padding(pad_id: int, _: nn.Module, ids: tuple[torch.Tensor], embedded: torch.Tensor) -> torch.Tensor:
    """Give the padding token's embedding no gradient, as in transformers.

    Its row is often zero, and the following norm would make the gradient a thousand times too large.
    """
    return torch.where((ids[0] == pad_id)[..., None], embedded.detach(), embedded)


class TorchAttention(nn.Module):
    """Causal attention by the backend or torch. Megatron's own, without TransformerEngine, stores all scores."""

    def __init__(self, *, backend: Backend, **_: Any) -> None:
        super().__init__()
        self._backend = backend

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Take query, key and value (length × rows × heads × size), return length × rows × (heads · size)."""
        if packed_seq_params is not None:
            cu_seqlens, max_length = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
            packed = (tensor[:, 0] for tensor in (query, key, value))
            attended = self._backend.varlen_attention(*packed, cu_seqlens=cu_seqlens, max_length=max_length)
            return attended.flatten(1)[:, None]
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


@contextlib.contextmanager
def output_layer(model: GPTModel, score: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Let ``score`` make the model's results from hidden states (length × rows × size) and the layer's weight."""

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        return score(hidden, model.output_layer.weight if weight is None else weight), None

    model.output_layer.forward = forward
    try:
        yield
    finally:
        del model.output_layer.forward


@contextlib.contextmanager
def rotary_positions(model: GPTModel, position_ids: torch.Tensor) -> Iterator[None]:
    """Rotate the tokens of a pack by ``position_ids`` (1 × length): Megatron's order is that of the tokens."""
    with model.rotary_pos_emb.register_forward_hook(lambda _, __, angles: angles[position_ids[0]]):
        yield


def _transformer_config(config: Any, *, tensor_parallel: int, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.model_type == "qwen3",
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tensor_parallel,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over the ranks, not averaged
        use_cpu_initialization=True,  # weights come from the checkpoint: no device is needed for random ones
        perform_initialization=False,
        gradient_accumulation_fusion=False,  # needs Apex
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
    )


def _require_supported(config: Any, *, tensor_parallel: int) -> None:
    refusals = {
        f"its architecture is {config.model_type}": config.model_type not in ARCHITECTURES,
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "its attention has a sliding window": getattr(config, "use_sliding_window", False),
        "its layers have biases": getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False),
        "its rotary embedding is scaled": (config.rope_parameters or {}).get("rope_type", "default") != "default",
    }
    for why, refused in refusals.items():
        if refused:
            raise ConfigError(
                "train.engine=megatron does not support this model",
                why=why,
                fix=f"train it with train.engine=fsdp; supported here are plain {', '.join(ARCHITECTURES)} models",
            )
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "intermediate size": config.intermediate_size,
        "vocabulary": config.vocab_size,
    }
    for name, size in sizes.items():
        if size % tensor_parallel:
            raise ConfigError(
                f"train.engine_options.tensor_parallel={tensor_parallel} does not divide the model",
                why=f"its {name}: {size}",
                fix="choose a divisor of all of " + ", ".join(f"{size} ({name})" for name, size in sizes.items()),
            )
