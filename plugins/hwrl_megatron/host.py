"""Megatron-core on a backend whose device is the host, such as the CPU backend.

Megatron-core asks ``torch.cuda`` for its device. Here its modules get another ``torch``, with the backend's device;
torch itself stays as it is. Remove this module when megatron-core uses ``torch.accelerator``. Tested with 0.16.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from contextlib import AbstractContextManager
from typing import Any

import torch

from hwrl.errors import BackendUnavailableError

_MODULES = ("distributed", "models.gpt.gpt_layer_specs", "optimizer", "pipeline_parallel.schedules")


@functools.cache
def redirect(device: torch.device) -> None:
    """Import megatron-core's modules for a GPT model, and let them use ``device`` for ``torch.cuda``.

    Raises BackendUnavailableError if this process has already imported megatron-core.
    """
    if "megatron.core" in sys.modules:  # other modules may hold functions that have the old torch
        raise BackendUnavailableError(
            f"Megatron-core cannot be prepared for {device}",
            why="this process has already imported it, so it is too late to redirect it",
            fix="call hwrl_megatron.prepare_process() before anything imports megatron",
        )
    for name in _MODULES:
        importlib.import_module(f"megatron.core.{name}")
    redirected = _RedirectedTorch(device)
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core.") and vars(module).get("torch") is torch:
            module.torch = redirected  # type: ignore[attr-defined] # its functions look up this name
    _pretend_device_types()
    _count_tokens_in_numpy()


class _RedirectedTorch(types.ModuleType):
    """torch for Megatron's modules: factories with ``device="cuda"`` make tensors on ``device``."""

    cuda: Any

    def __init__(self, device: torch.device) -> None:
        super().__init__("torch, redirected")
        self.cuda = _RedirectedCuda(device)
        for name in ("empty", "full", "ones", "tensor", "zeros"):  # Megatron calls these with a literal "cuda"
            setattr(self, name, _redirected(getattr(torch, name), device))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _RedirectedCuda(types.ModuleType):
    """torch.cuda for Megatron's modules: the current device, an argument of factories, is ``device``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("torch.cuda, redirected")
        self._device = device

    def current_device(self) -> torch.device:
        return self._device

    def synchronize(self) -> None:
        """Do nothing: on the host a call has done its work when it returns."""

    def current_stream(self) -> _HostStream:
        return _HostStream()

    Stream = current_stream

    def stream(self, _: _HostStream) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


class _HostStream:
    """A stream, or its event, on a device that works in the order of the calls."""

    def wait_stream(self, _: _HostStream) -> None:
        """Do nothing."""

    def record_event(self) -> _HostStream:
        return self

    def synchronize(self) -> None:
        """Do nothing."""

    def wait(self, _: _HostStream) -> None:
        """Do nothing."""


def _redirected(factory: Any, target: torch.device) -> Any:
    @functools.wraps(factory)
    def make(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
        made: torch.Tensor = factory(*args, device=target if device == "cuda" else device, **kwargs)
        return made

    return make


def _pretend_device_types() -> None:
    """Give parameters the type names of CUDA tensors: the distributed optimizer sorts by them and knows no others."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    build = DistributedOptimizer._build_model_and_main_param_groups.__func__

    def build_with_types(cls: Any, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any) -> Any:
        for group in opt_group_ranges:
            for parameter in group["params"]:
                parameter.type = functools.partial(_device_type_name, parameter)
        return build(cls, gbuf_ranges, param_gbuf_map, opt_group_ranges, config)

    DistributedOptimizer._build_model_and_main_param_groups = classmethod(build_with_types)


def _count_tokens_in_numpy() -> None:
    """Turn the token counts of experts to numpy arrays: Megatron does that with tensors of a CUDA device only."""
    from megatron.core.transformer.moe import token_dispatcher

    def counts(tensor: Any, **options: bool) -> Any:
        return tensor.numpy() if options.get("as_numpy") and isinstance(tensor, torch.Tensor) else tensor

    token_dispatcher.maybe_move_tensor_to_cpu = counts


def _device_type_name(parameter: torch.Tensor) -> str:
    return torch.Tensor.type(parameter).replace("torch.", "torch.cuda.")
