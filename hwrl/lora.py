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
_ALL_LINEAR = "all-linear"
_OF_EXPERTS = {"gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
"""Names that PEFT takes for a mixture's router and experts, also where a linear layer has them."""


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
    the host if the model is on the meta device. In a mixture of experts, "all-linear" leaves out the experts, the
    router, and layers with the names of experts'. Raises ConfigError if PEFT is not installed, if a name in ``lora``
    fits no layer, or if an adapter would be on experts.
    """
    require_peft()
    import torch
    from peft import LoraConfig, inject_adapter_in_model

    config = lora.peft_config()
    if lora.target_modules == _ALL_LINEAR and any(parameter.dim() > 2 for parameter in model.parameters()):
        config["target_modules"] = _linear_layers(model)
    try:
        with torch.random.fork_rng(devices=[]), _stand_ins(model):
            torch.manual_seed(seed)
            adapted = inject_adapter_in_model(LoraConfig(**config), model)
        _require_layers(adapted, lora.target_modules)
        return adapted
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


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[None]:
    """Run ``model`` without its adapter inside the block: it is the base. Nothing is copied or moved."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True  # enable_adapters(False) would also freeze the adapter, and sharding forbids it
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@functools.lru_cache(maxsize=4)
def described_model(directory: Path, *, dtype: torch.dtype, lora: LoraSettings | None) -> Any:
    """Return the model that a train engine of ``dtype`` would have, on the meta device: only to look at.

    Its trained parameters are float32. The result is shared; do not change it.
    """
    import torch

    from hwrl.models import build_meta_model

    model = build_meta_model(directory, dtype=torch.float32)
    return model if lora is None else with_adapter(model, lora, seed=0, base_dtype=dtype)


def _linear_layers(model: Any) -> list[str]:
    """Return the ends of the names of the linear layers of a mixture of experts."""
    import torch

    output = model.get_output_embeddings()
    layers = (name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear) and one is not output)
    return sorted({name.rpartition(".")[2] for name in layers} - _OF_EXPERTS)


def _require_layers(adapted: Any, targets: str | tuple[str, ...]) -> None:
    """Raise ValueError if a name in ``targets`` has no adapter in the model, or if a parameter without a layer has."""
    wrapped = [name for name, one in adapted.named_modules() if type(one).__name__ == "ParamWrapper"]
    if wrapped:
        raise ValueError(f"it would change experts or their router, which hwrl cannot serve: {wrapped[0]}")
    layers = {name.partition(".lora_")[0] for name, _ in adapted.named_parameters() if ".lora_" in name}
    for target in targets if isinstance(targets, tuple) else ():
        if not any(f".{layer}".endswith(f".{target}") for layer in layers):
            raise ValueError(f"no layer that can have an adapter is called {target}")


def save_adapter(
    directory: Path, weights: Mapping[str, torch.Tensor], *, config: Mapping[str, Any], model_directory: Path
) -> None:
    """Write ``weights`` (PEFT's names) to ``directory``, for ``PeftModel.from_pretrained``.

    ``config`` comes from :meth:`~hwrl.interfaces.LoraSettings.peft_config`.
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    targets = config["target_modules"]
    if targets == _ALL_LINEAR:  # PEFT would also adapt a mixture's experts
        targets = sorted({name.partition(".lora_")[0].rpartition(".")[2] for name in weights})
    complete = LoraConfig(
        **{**config, "target_modules": targets},
        base_model_name_or_path=str(model_directory.absolute()),
        inference_mode=True,
    )
    complete.save_pretrained(str(directory))
    save_file({name: weights[name].contiguous() for name in weights}, directory / "adapter_model.safetensors")


def adapter_name(name: str) -> str | None:
    """Return the name in PEFT's checkpoints of the model's parameter ``name``; None if it belongs to the base.

    >>> adapter_name("model.layers.0.mlp.up_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.mlp.up_proj.lora_A.weight'
    >>> adapter_name("model.layers.0.mlp.up_proj.base_layer.weight")
    """
    return _PREFIX + name.replace(_IN_MODEL, ".", 1) if ".lora_" in name else None


def base_name(name: str) -> str:
    """Return the Hugging Face name of the parameter ``name`` of a model with an adapter.

    >>> base_name("model.layers.0.mlp.up_proj.base_layer.weight")
    'model.layers.0.mlp.up_proj.weight'
    """
    return name.replace(".base_layer.", ".", 1)
