"""LoRA adapters from tensors in vLLM's workers. vLLM itself only reads them from directories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from hwrl.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from hwrl.interfaces import RolloutSettings

ADAPTER = 1
"""vLLM's number of an engine's only adapter."""

_TENSOR = re.compile(r"\.lora_([AB]\.weight|embedding_[AB])$")


def lora_arguments(rank: int, *, tensor_parallel: int) -> dict[str, Any]:
    """Return the engine arguments for one adapter of ``rank``. vLLM supports certain ranks; the next one up is used.

    Several workers divide both factors: in merged layers vLLM 0.23 cannot divide only one. Raises ConfigError if
    ``rank`` is too large.
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
    """Return vLLM's request for the adapter. vLLM does not read the path, because the adapter is loaded already."""
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy", ADAPTER, "no-directory")


def layers_without_place(manager: Any, names: Iterable[str]) -> list[str]:
    """Return the layers in ``names`` (an adapter's tensors, PEFT's names) that cannot have an adapter in vLLM.

    vLLM checks this only for adapters from directories. Otherwise it ignores such layers, and the model would differ
    from the trained one. ``manager`` is a worker's LoRA manager.
    """
    adapters = manager._adapter_manager
    places = {part for path in adapters.modules for part in adapters.packed_modules.get(path, [path])}
    layers = {_TENSOR.sub("", name).removeprefix("base_model.model.") for name in names}
    return sorted(layers - places)


def require_places(without_place: Iterable[Sequence[str]]) -> None:
    """Raise ConfigError if a worker's model has no place for layers of the adapter."""
    layers = sorted(set().union(*without_place))
    if layers:
        raise ConfigError(
            "vLLM cannot serve this adapter",
            why=f"its model supports no adapter in {', '.join(layers[:3])} ({len(layers)} in all); it would ignore "
            "them, and the responses would come from another policy than the trained one",
            fix="take these layers out of model.target_modules, or set rollout.engine=embedded",
        )


def replace_adapter(manager: Any, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Replace the adapter by ``weights`` (PEFT's names), with the rank and scale of PEFT's ``config``.

    ``manager`` is a worker's LoRA manager.
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


def keep_indices(model: torch.nn.Module) -> None:
    """Let vLLM keep the index tensors of layers with adapters during a sleep of level 2.

    Then vLLM keeps buffers, and weights are sent again. The index tensors, such as the division of the vocabulary
    among workers, are neither; before vLLM 0.32 they come back as zeros. Here they become buffers.
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
    """Return the function from a weight's name to its name for the loaders of ``model``, which supports adapters.

    In older versions of vLLM a layer with an adapter does not load its own weights: they are one level deeper.
    """
    from vllm.lora.layers import BaseLayerWithLoRA

    if hasattr(BaseLayerWithLoRA, "load_weights"):
        return str
    adapted = {path for path, layer in model.named_modules() if isinstance(layer, BaseLayerWithLoRA)}
    packed: Mapping[str, Sequence[str]] = getattr(model, "packed_modules_mapping", {})
    packed_into = {part: whole for whole, parts in packed.items() for part in parts}

    def named(name: str) -> str:
        path, _, leaf = name.rpartition(".")
        parent, _, layer = path.rpartition(".")
        return f"{path}.base_layer.{leaf}" if f"{parent}.{packed_into.get(layer, layer)}" in adapted else name

    return named
