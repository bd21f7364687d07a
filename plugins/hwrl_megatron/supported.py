"""Refuse models, sizes and settings by name, before the engine allocates anything. Needs no megatron."""

from __future__ import annotations

from typing import Any

from hwrl.errors import ConfigError
from hwrl.interfaces import EngineSettings
from hwrl_megatron.layout import Layout, is_mixture
from hwrl_megatron.options import MegatronOptions

ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen3_moe")
"""The supported values of ``model_type`` in Hugging Face configurations."""

_ROPES = ("default", "llama3")


def require_settings(settings: EngineSettings) -> None:
    """Raise ConfigError for settings that only other engines support."""
    if settings.host_step:
        raise ConfigError(
            "train.host_step=true is not possible with train.engine=megatron",
            why="its distributed optimizer steps on the device",
            fix="set train.optimizer_offload=true: the optimizer's state is then on the host between two steps; or "
            "use train.engine=fsdp",
        )
    if settings.compile is True:
        raise ConfigError(
            "train.compile=true is not possible with train.engine=megatron",
            why="its layers have kernels of their own, and are not compiled",
            fix="set train.compile to auto or false",
        )
    for name, ranks in (("context_parallel", settings.context_parallel), ("shard_ranks", settings.shard_ranks or 1)):
        if ranks > 1:
            raise ConfigError(
                f"train.{name}={ranks} is not possible with train.engine=megatron",
                why="Megatron divides the model by its own options, and this engine does not pack rows",
                fix=f"remove train.{name}; see train.engine_options, or use train.engine=fsdp",
            )


def make_layout(config: Any, options: MegatronOptions, *, rank: int, ranks: int) -> Layout:
    """Return the place of ``rank`` of ``ranks``, for the model with this transformers ``config``.

    Raises ConfigError if the model is not supported, or if the options do not divide the model or the ranks.
    """
    _require_model(config)
    each = options.tensor_parallel * options.pipeline_parallel
    _require_ranks(ranks, options, each=each)
    _require_divisors(config, options)
    return Layout(rank, options.tensor_parallel, ranks // each, options.pipeline_parallel, options.expert_parallel)


def _require_model(config: Any) -> None:
    for why, refused in _refusals(config).items():
        if refused:
            raise ConfigError(
                "train.engine=megatron does not support this model",
                why=why,
                fix=f"train it with train.engine=fsdp; supported here are plain {', '.join(ARCHITECTURES)} models",
            )


def _refusals(config: Any) -> dict[str, bool]:
    kind = config.model_type
    if kind not in ARCHITECTURES:
        return {f"its architecture is {kind}": True}
    rope = config.rope_parameters or {}
    rope_type = rope.get("rope_type", "default")
    layer_types = getattr(config, "layer_types", None) or []
    mixture = is_mixture(config)
    dense_layers = mixture and (bool(config.mlp_only_layers) or config.decoder_sparse_step != 1)
    one_expert = mixture and config.num_experts_per_tok == 1 and config.norm_topk_prob
    return {
        f"its activation is {config.hidden_act}": config.hidden_act != "silu",
        "its attention has a sliding window": bool(getattr(config, "use_sliding_window", False))
        or any(layer != "full_attention" for layer in layer_types),
        "its layers have biases": bool(getattr(config, "attention_bias", False) or getattr(config, "mlp_bias", False)),
        f"its rotary embedding is scaled by {rope_type}": rope_type not in _ROPES,
        "its rotary embedding rotates a part of each head": rope.get("partial_rotary_factor", 1.0) != 1.0,
        "its weights are quantized": getattr(config, "quantization_config", None) is not None,
        "some of its layers have experts and some have none": dense_layers,
        "its tokens go to one expert each, with the weight 1": one_expert,
    }


def _require_ranks(ranks: int, options: MegatronOptions, *, each: int) -> None:
    if ranks % each:
        sizes = {"tensor_parallel": options.tensor_parallel, "pipeline_parallel": options.pipeline_parallel}
        words = " and ".join(f"train.engine_options.{name}={size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{words} is not possible on {ranks} ranks",
            why=f"each copy of the model needs {each} ranks",
            fix=f"set train.ranks to {each} or a multiple of it",
        )
    copies = ranks // each
    if copies % options.expert_parallel:
        raise ConfigError(
            f"train.engine_options.expert_parallel={options.expert_parallel} is not possible on {ranks} ranks",
            why=f"so many copies of the model share their experts, and there are {copies}",
            fix=f"set train.ranks to a multiple of {each * options.expert_parallel}",
        )


def _require_divisors(config: Any, options: MegatronOptions) -> None:
    tensor = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "vocabulary": config.vocab_size,
    }
    if is_mixture(config):
        tensor["expert's intermediate size"] = config.moe_intermediate_size
    else:
        tensor["intermediate size"] = config.intermediate_size
    experts = {"experts": config.num_experts if is_mixture(config) else 1}
    _require_divides("tensor_parallel", options.tensor_parallel, tensor)
    _require_divides("pipeline_parallel", options.pipeline_parallel, {"layers": config.num_hidden_layers})
    _require_divides("expert_parallel", options.expert_parallel, experts)


def _require_divides(option: str, number: int, sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size % number:
            raise ConfigError(
                f"train.engine_options.{option}={number} does not divide the model",
                why=f"its {name}: {size}",
                fix="choose a divisor of all of " + ", ".join(f"{size} ({name})" for name, size in sizes.items()),
            )
