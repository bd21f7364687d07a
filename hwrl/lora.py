"""LoRA adapters by PEFT: put them into a model, save them, and translate between the names of their tensors."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwrl.errors import ConfigError
from hwrl.interfaces import LoraSettings

if TYPE_CHECKING:
    import torch

_IN_MODEL = ".default."
"""PEFT's name of the adapter, inside the parameter names of a model. The names in a checkpoint lack it."""
_PREFIX = "base_model.model."
"""The prefix of every tensor name in PEFT's checkpoints."""


def require_peft() -> None:
    """Raise ConfigError if PEFT is not installed; imports nothing."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError(
            "model.lora_rank cannot be used",
            why="PEFT, the library for LoRA adapters, is not installed",
            fix="pip install 'hwrl[lora]'; or train the whole model, with model.lora_rank=0",
        )


def add_adapter(model: Any, lora: LoraSettings, *, seed: int = 0) -> Any:
    """Put an adapter into ``model``, in place, and freeze the rest. Return the model; its outputs are the same.

    The adapter has the model's dtype. Its first values depend only on ``seed`` and the shapes of the model; they are on
    the host if the model is on the meta device. Raises ConfigError if PEFT is not installed or finds no layer to adapt.
    """
    require_peft()
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    try:
        with torch.random.fork_rng(devices=[]), _stand_ins(model):
            torch.manual_seed(seed)
            return inject_adapter_in_model(LoraConfig(**lora.peft_config()), model)
    except (ValueError, re.error) as exc:
        raise ConfigError(
            "the model cannot have this adapter",
            why=str(exc).splitlines()[0],
            fix="correct model.target_modules: all-linear, or the ends of the names of the model's layers",
        ) from exc


@contextlib.contextmanager
def _stand_ins(model: Any) -> Iterator[None]:
    """Inside, parameters on the meta device are host tensors with one value's memory: PEFT puts an adapter beside them.

    Tied parameters stay tied.
    """
    import torch

    originals: dict[Any, Any] = {}
    stand_ins: dict[Any, Any] = {}
    for parameter in model.parameters():
        if parameter.is_meta:
            one = torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)
            stand_ins[parameter] = torch.nn.Parameter(one, requires_grad=parameter.requires_grad)
            originals[stand_ins[parameter]] = parameter
    _exchange(model, stand_ins)
    yield
    for stand_in, original in originals.items():
        original.requires_grad_(stand_in.requires_grad)
    _exchange(model, originals)


def _exchange(model: Any, others: Mapping[Any, Any]) -> None:
    """Replace each parameter of ``model`` that is a key of ``others``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter in others:
                module._parameters[name] = others[parameter]


def with_adapter(model: Any, lora: LoraSettings, *, seed: int, base_dtype: torch.dtype) -> Any:
    """Put an adapter in float32 into ``model``, on the meta device; the frozen rest gets ``base_dtype``."""
    adapted = add_adapter(model, lora, seed=seed)
    for parameter in adapted.parameters():
        if not parameter.requires_grad and parameter.is_floating_point():
            parameter.data = parameter.data.to(base_dtype)
    return adapted


@functools.lru_cache(maxsize=4)
def described_model(directory: Path, *, dtype: torch.dtype, lora: LoraSettings | None) -> Any:
    """Return the model that a train engine of ``dtype`` would have, on the meta device: only to look at.

    Its trained parameters are float32. The result is shared; do not change it.
    """
    import torch

    from hwrl.models import build_meta_model

    model = build_meta_model(directory, dtype=torch.float32)
    return model if lora is None else with_adapter(model, lora, seed=0, base_dtype=dtype)


def save_adapter(
    directory: Path, weights: Mapping[str, torch.Tensor], *, config: Mapping[str, Any], model_directory: Path
) -> None:
    """Write ``weights`` (PEFT's names) to ``directory``, for ``PeftModel.from_pretrained``.

    ``config`` comes from :meth:`~hwrl.interfaces.LoraSettings.peft_config`.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    complete = LoraConfig(**config, base_model_name_or_path=str(model_directory), inference_mode=True)
    complete.save_pretrained(str(directory))
    save_file({name: weights[name].contiguous() for name in weights}, directory / "adapter_model.safetensors")


def adapter_name(name: str) -> str | None:
    """Return the name in PEFT's checkpoints of the model's parameter ``name``; None if it belongs to the base.

    >>> adapter_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    >>> adapter_name("model.layers.0.mlp.up_proj.base_layer.weight")
    """
    return _PREFIX + name.replace(_IN_MODEL, ".", 1) if ".lora_" in name else None


def is_adapters(name: str) -> bool:
    """Return whether ``name`` is the name of an adapter's tensor, as :func:`adapter_name` returns it."""
    return name.startswith(_PREFIX)


def base_name(name: str) -> str:
    """Return the Hugging Face name of the parameter ``name`` of a model with an adapter.

    >>> base_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(".base_layer.", ".", 1)
