"""LoRA adapters in vLLM's workers, out of tensors: vLLM itself reads them from directories only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

import torch

from hwrl.errors import ConfigError
from hwrl.rollout.engine import RolloutSettings

ADAPTER = 1
"""vLLM's number of the one adapter that an engine has."""


def lora_arguments(rank: int, *, tensor_parallel: int) -> dict[str, Any]:
    """Return the engine arguments for one adapter of ``rank``; vLLM knows some sizes only, and a smaller one fits.

    Several workers divide both of its factors: vLLM 0.23 cannot divide one alone in layers that it merges.
    """
    from vllm.config.lora import MaxLoRARanks

    room = min((size for size in get_args(MaxLoRARanks) if size >= rank), default=rank)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "fully_sharded_loras": tensor_parallel > 1,
    }


def require_dtype(settings: RolloutSettings) -> None:
    """Raise ConfigError if vLLM cannot serve an adapter in ``settings.dtype`` here."""
    from vllm.platforms import current_platform

    if settings.lora is not None and settings.dtype == torch.float32 and not current_platform.is_cpu():
        raise ConfigError(
            "an adapter cannot be served in float32",
            why="vLLM's kernels for adapters take float16 and bfloat16 on this device",
            fix="set model.dtype=bfloat16",
        )


def request_lora() -> Any:
    """Return what asks vLLM to generate with the adapter. The path is not read, as the adapter is there."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "no-directory")


def replace_adapter(manager: Any, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Put the adapter ``weights`` (PEFT's names), of the form in PEFT's ``config``, in the place of the one before.

    ``manager`` is that of a worker.
    """
    from vllm.lora.peft_helper import PEFTHelper

    form = PEFTHelper.from_dict(dict(config))
    form.validate_legal(manager.lora_config)
    adapters = manager._adapter_manager
    adapter = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=ADAPTER,
        tensors={name: tensor.clone() for name, tensor in weights.items()},  # vLLM scales them in place
        peft_helper=form,
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
    )
    adapters.remove_adapter(ADAPTER)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(ADAPTER)


def with_loaders_names(model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return ``weights`` as the loaders of ``model``, whose layers can have adapters, call them.

    In versions of vLLM in which such a layer does not load its own weights, they lie a level deeper.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return weights
    adapted = {path for path, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    packed_into = {part: whole for whole, parts in packed.items() for part in parts}

    def named(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        return f"{path}.base_layer.{leaf}" if f"{parent}.{packed_into.get(layer, layer)}" in adapted else name

    return {named(name): tensor for name, tensor in weights.items()}
