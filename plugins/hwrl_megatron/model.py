"""A GPTModel that computes what a model of transformers does."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch import nn

from hwrl.interfaces import Backend
from hwrl_megatron.layout import Layout, head_size, is_mixture


class _Model(GPTModel):  # type: ignore[misc] # mypy does not see Megatron
    """A GPTModel whose stages do not share random embeddings: the weights come from the model's files."""

    def _is_in_embd_group(self) -> bool:
        return False


def build_gpt(config: Any, layout: Layout, *, backend: Backend, dtype: torch.dtype) -> GPTModel:
    """Return this rank's part of the model with this transformers ``config``, on the device, with arbitrary weights.

    ``backend`` computes the attention over packs. Needs Megatron's parallel state.
    """
    experts = config.num_experts if is_mixture(config) else None
    layer = get_gpt_layer_local_spec(num_experts=experts, qk_layernorm=_has_qk_norms(config), normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = ModuleSpec(TorchAttention, params={"backend": backend})
    with torch.device(backend.device()):
        model = _Model(
            _transformer_config(config, layout, dtype=dtype),
            layer,
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_position_embeddings,
            pre_process=layout.stage == 0,
            post_process=layout.stage == layout.stages - 1,
            position_embedding_type="rope",
            rotary_base=config.rope_parameters["rope_theta"],
            share_embeddings_and_output_weights=config.tie_word_embeddings,
        )
    _scale_rotation(model, config.rope_parameters)
    if config.pad_token_id is not None and model.pre_process:
        model.embedding.word_embeddings.register_forward_hook(functools.partial(_hold_padding, config.pad_token_id))
    return model.to(backend.device(), dtype).eval()


def _has_qk_norms(config: Any) -> bool:
    return config.model_type in ("qwen3", "qwen3_moe")


def _scale_rotation(model: GPTModel, rope: dict[str, Any]) -> None:
    """Scale the rotation's frequencies as Llama 3 does. Megatron's own argument sets only one of the four numbers."""
    if rope.get("rope_type", "default") == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        embedding = model.rotary_pos_emb
        embedding.inv_freq = embedding._apply_scaling(embedding.inv_freq, **{name: rope[name] for name in names})


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
    """Let ``score`` replace the output layer: it gets hidden states (length × rows × size) and the layer's weight."""

    def forward(hidden: torch.Tensor, weight: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, None]:
        return score(hidden, model.output_layer.weight if weight is None else weight), None

    model.output_layer.forward = forward
    try:
        yield
    finally:
        del model.output_layer.forward


@contextlib.contextmanager
def rotary_positions(model: GPTModel, position_ids: torch.Tensor) -> Iterator[None]:
    """Rotate the tokens of a pack by ``position_ids`` (1 × length). Megatron would count through the whole pack."""
    with model.rotary_pos_emb.register_forward_hook(lambda _, __, angles: angles[position_ids[0]]):
        yield


def _transformer_config(config: Any, layout: Layout, *, dtype: torch.dtype) -> TransformerConfig:
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=head_size(config),
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=_has_qk_norms(config),
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        gated_linear_unit=True,
        activation_func=nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.stages,
        expert_model_parallel_size=layout.experts,
        pipeline_dtype=dtype,
        variable_seq_lengths=layout.stages > 1,  # packs differ in length
        deallocate_pipeline_outputs=True,  # the next stage has a copy
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        calculate_per_token_loss=True,  # gradients are summed over the ranks, not averaged
        use_cpu_initialization=True,  # weights come from the checkpoint: no random ones are needed
        perform_initialization=False,
        gradient_accumulation_fusion=False,  # needs Apex
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        moe_token_dispatcher_type="alltoall",  # ranks have different numbers of tokens
        **_expert_config(config),
    )


def _expert_config(config: Any) -> dict[str, Any]:
    if not is_mixture(config):
        return {}
    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16 forgets to define it without TransformerEngine
        moe_utils.te_general_gemm = None
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_router_topk": config.num_experts_per_tok,
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",  # the loss is the policy's alone, as with train.engine=fsdp
    }
