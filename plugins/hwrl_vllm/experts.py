"""Mixtures of experts in vLLM: prepare the weights of experts for their kernel in every load."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def prepare_in_each_load(model: torch.nn.Module) -> None:
    """Let each later load of ``model`` prepare the weights of its experts for their kernel, as the first one did.

    vLLM 0.32 prepares the weights for the kernel in the first load only. A CPU's kernel needs packed weights: after a
    later load it would read the unpacked ones as if they were packed, and compute wrong results. Remove this when vLLM
    prepares them in each load.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if _experts_of(method) is not None:
            method.process_weights_after_loading = partial(_process, method)


def _process(method: Any, layer: torch.nn.Module) -> None:
    """Prepare the weights of ``layer`` as vLLM does, and for its kernel if vLLM leaves that out."""
    experts = _experts_of(method)
    prepare = experts.process_weights_after_loading
    calls: list[Any] = []
    experts.process_weights_after_loading = calls.append
    try:
        type(method).process_weights_after_loading(method, layer)
    finally:
        del experts.process_weights_after_loading
    if calls or _experts_of(method) is experts:  # else vLLM made a new kernel, and has prepared the weights for it
        prepare(layer)


def _experts_of(method: Any) -> Any:
    """Return the experts in the kernel of ``method``, a layer's quantization method; None if it has no such kernel."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if hasattr(experts, "process_weights_after_loading") else None
