"""LoRA adapters on a model, by PEFT: trained alone, named and configured as PEFT's checkpoints are."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.errors import ConfigError
from hwrl.interfaces import LoraSettings

if TYPE_CHECKING:
    import torch

_IN_MODEL = ".default."
"""PEFT's name of the one adapter, inside the names of its parameters in a model; checkpoints are without."""
_PREFIX = "base_model.model."
"""What PEFT's checkpoints begin the name of every tensor with."""


def require_peft() -> None:
    """Raise ConfigError if PEFT is not installed; imports nothing."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora_rank cannot be used",
            why="PEFT, which puts LoRA adapters into a model, is not installed",
            fix="pip install 'hwrl[lora]'; or train the whole model, with model.lora_rank=0",
        )


def add_adapter(model: Any, lora: LoraSettings, *, seed: int = 0) -> Any:
    """Put an adapter into ``model``, in place, and freeze the rest; return the model, which computes as before.

    The adapter's first values depend on ``seed`` and the model's form alone; they have the model's dtype. Raises
    ConfigError if PEFT is not installed or finds no layer to adapt.
    """
    require_peft()
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return inject_adapter_in_model(LoraConfig(**lora.peft_config()), model)
    except (ValueError, re.error) as exc:
        raise ConfigError(
            "the model cannot have this adapter",
            why=str(exc).splitlines()[0],
            fix="correct model.target_modules: all-linear, or the ends of the names of layers that the model has",
        ) from exc


def save_adapter(
    directory: Path, weights: Mapping[str, torch.Tensor], *, config: Mapping[str, Any], model_directory: Path
) -> None:
    """Write ``weights`` (PEFT's names) to ``directory`` so that ``PeftModel.from_pretrained`` loads them.

    ``config`` is what :meth:`LoraSettings.peft_config` returned.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    whole = LoraConfig(**config, base_model_name_or_path=str(model_directory), inference_mode=True)
    whole.save_pretrained(str(directory))
    save_file({name: weights[name].contiguous() for name in weights}, directory / "adapter_model.safetensors")


def divided(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return what a checkpoint holds of ``model``: its base under Hugging Face names, its adapter under PEFT's."""
    own = model.state_dict()
    base = {base_name(name): tensor for name, tensor in own.items() if not adapter_name(name)}
    return base, {named: tensor for name, tensor in own.items() if (named := adapter_name(name))}


def adapter_name(name: str) -> str | None:
    """Return what PEFT's checkpoints call the adapter's parameter ``name`` of a model; None if it is the base's.

    >>> adapter_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    >>> adapter_name("model.layers.0.mlp.up_proj.base_layer.weight")
    """
    return _PREFIX + name.replace(_IN_MODEL, ".", 1) if ".lora_" in name else None


def is_adapters(name: str) -> bool:
    """Return whether ``name`` is one that :func:`adapter_name` gives."""
    return name.startswith(_PREFIX)


def base_name(name: str) -> str:
    """Return the Hugging Face name of the parameter ``name`` of a model with an adapter.

    >>> base_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(".base_layer.", ".", 1)
