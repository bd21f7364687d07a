"""Load LoRA adapters into vLLM's workers from tensors. vLLM itself reads adapters only from directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from hwrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hwrl.interfaces import RolloutSettings

ADAPTER = 1
"""The number by which vLLM knows the engine's only adapter."""

_TENSOR = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$")


def lora_arguments(rank: int, *, tensor_parallel: int) -> dict[str, Any]:
    """Return the engine arguments for one adapter of ``rank``.

    vLLM has room for certain ranks only, so this takes the next larger one. Several workers divide both factors of the
    adapter, because vLLM 0.23 cannot divide only one of them in merged layers. Raises ConfigError if ``rank`` is too
    large.
    """
    from vllm.config.lora import MaxLoRARanks

    sizes = get_args(MaxLoRARanks)
    if rank > max(sizes):
        raise ConfigError(
            f"vLLM cannot serve an adapter of rank {rank}",
            why=f"it has room for the ranks {', '.join(map(str, sizes))}",
            fix=f"set model.lora_rank to {max(sizes)} or less",
        )
    room = min(size for size in sizes if size >= rank)
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": room,
        "fully_sharded_loras": tensor_parallel > 1,
    }


def require_dtype(settings: RolloutSettings) -> None:
    """Raise ConfigError if vLLM cannot serve an adapter in ``settings.dtype`` here."""
    import torch
    from vllm.platforms import current_platform

    if settings.lora is not None and settings.dtype == torch.float32 and not current_platform.is_cpu():
        raise ConfigError(
            "an adapter cannot be served in float32",
            why="vLLM's adapter kernels support float16 and bfloat16 on this device",
            fix="set model.dtype=bfloat16",
        )


def request_lora() -> Any:
    """Return the part of a request that names the adapter. vLLM never reads its path: the adapter is loaded already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "no-directory")


def layers_without_place(manager: Any, names: Iterable[str]) -> list[str]:
    """Return the layers that cannot have an adapter in vLLM. ``names`` are PEFT's names of an adapter's tensors.

    vLLM checks this only for adapters from directories. From tensors it ignores such layers silently, and then the
    model differs from the trained one. ``manager`` is a worker's LoRA manager.
    """
    adapters = manager._adapter_manager
    places = {part for path in adapters.modules for part in adapters.packed_modules.get(path, [path])}
    layers = {_TENSOR.sub("", name).removeprefix("base_model.model.") for name in names}
    return sorted(layers - places)


def require_places(without_place: Iterable[Sequence[str]]) -> None:
    """Raise ConfigError if a worker found layers without a place. ``without_place`` has each worker's list."""
    layers = sorted(set().union(*without_place))
    if layers:
        raise ConfigError(
            "vLLM cannot serve this adapter",
            why=f"its model supports no adapter in {', '.join(layers[:3])} ({len(layers)} in all); it would ignore "
            "them, and the responses would come from another policy than the trained one",
            fix="take these layers out of model.target_modules, or set rollout.engine=embedded",
        )


def replace_adapter(manager: Any, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Replace the worker's adapter by ``weights``, whose names are PEFT's. PEFT's ``config`` has the rank and scale.

    ``manager`` is the worker's LoRA manager. Does not wait for the device.
    """
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_dict(dict(config))
    helper.validate_legal(manager.lora_config)
    adapters = manager._adapter_manager
    adapter = manager._lora_model_cls.from_lora_tensors(
        lora_model_id=ADAPTER,
        tensors={name: tensor.clone() for name, tensor in weights.items()},  # vLLM scales them in place
        peft_helper=helper,
        device=str(manager.device),
        dtype=manager.lora_config.lora_dtype,
        model_vocab_size=manager.vocab_size,
    )
    adapters.remove_adapter(ADAPTER)
    adapters.add_adapter(adapter)
    adapters.activate_adapter(ADAPTER)


def keep_indices(model: torch.nn.Module) -> None:
    """Turn the index tensors of layers with adapters into buffers, so that vLLM keeps them in a sleep of level 2.

    An index tensor says, for example, how the vocabulary is divided among workers. In that sleep vLLM keeps the
    buffers, and the weights are sent again afterwards. An index tensor is neither; before vLLM 0.32 it comes back as
    zeros.
    """
    import torch
    from vllm.lora.layers import BaseLayerWithLoRA

    for layer in model.modules():
        if isinstance(layer, BaseLayerWithLoRA):
            for name, value in list(vars(layer).items()):
                if isinstance(value, torch.Tensor) and not value.is_floating_point():
                    layer._buffers[name] = vars(layer).pop(name)
                    layer._non_persistent_buffers_set.add(name)


def loaders_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Return a function from a weight's name to the name under which the loaders of ``model`` expect it.

    ``model`` supports adapters. In older versions of vLLM a layer with an adapter wraps the original layer as
    ``base_layer``, and only that one loads weights. Newer versions need no other names.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return str
    adapted = {path for path, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    packed_into = {part: whole for whole, parts in packed.items() for part in parts}

    def loaders_name(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        return f"{path}.base_layer.{leaf}" if f"{parent}.{packed_into.get(layer, layer)}" in adapted else name

    return loaders_name
