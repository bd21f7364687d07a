"""megatron-core on the host: it takes ``torch.cuda`` for the only device there is.

Each replacement is inside megatron's own modules; torch itself is not touched. All of this can go when megatron-core
asks ``torch.accelerator`` or its parameters for the device. Written for, and tested with, megatron-core 0.16.
"""

from __future__ import annotations

import functools
import importlib
import sys
import types
from typing import Any

import torch

_MODULES = ("distributed", "models.gpt.gpt_layer_specs", "optimizer")


def install() -> None:
    """Import the parts of megatron-core that train a GPT model, and make them run on the host."""
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    host = _HostTorch("torch on the host")
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = host  # type: ignore[attr-defined] # the name that its functions look up
    _name_types_as_on_a_device()


class _HostTorch(types.ModuleType):
    """torch, as a megatron module sees it: tensors asked for on the device are made on the host."""

    cuda: Any

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.cuda = _HostCuda("torch.cuda on the host")
        for factory in ("empty", "full", "ones", "tensor", "zeros"):  # called with the literal device "cuda"
            setattr(self, factory, _on_host(getattr(torch, factory)))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _HostCuda(types.ModuleType):
    """torch.cuda, as a megatron module sees it: its current device, which is passed to factories, is the host."""

    def current_device(self) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


def _on_host(factory: Any) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = factory(*args, device="cpu" if device == "cuda" else device, **kwargs)
        return made

    return make


def _name_types_as_on_a_device() -> None:
    """The distributed optimizer sorts parameters by ``type()``, and accepts names of device tensors only."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer._build_model_and_main_param_groups.__func__

    def renamed(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        for group in opt_group_ranges:
            for parameter in group["params"]:
                parameter.type = functools.partial(_device_type_name, parameter)
        return build(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config)

    DistributedOptimizer._build_model_and_main_param_groups = classmethod(renamed)


def _device_type_name(parameter: torch.Tensor) -> str:
    return torch.Tensor.type(parameter).replace("torch.", "torch.cuda.")
