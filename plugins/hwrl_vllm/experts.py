"""Mixtures of experts in vLLM: every load must prepare the experts' weights for their kernel."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def prepare_in_each_load(model: torch.nn.Module) -> None:
    """Change ``model`` so that each later load prepares the experts' weights for their kernel, as the first load does.

    vLLM 0.32 prepares these weights in the first load only. The kernel for CPUs needs packed weights. After a later
    load it would read unpacked weights as packed ones, and compute wrong results. Remove this function when vLLM
    prepares the weights in each load.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if _experts_of(method) is not None:
            method.process_weights_after_loading = partial(_process, method)


def _process(method: Any, layer: torch.nn.Module) -> None:
    """Prepare the weights of ``layer`` as vLLM does, and then for the kernel if vLLM did not."""
    experts = _experts_of(method)
    prepare = experts.process_weights_after_loading
    calls: list[Any] = []  # vLLM's call for the old kernel is caught, so that the weights are not prepared twice
    experts.process_weights_after_loading = calls.append
    try:
        type(method).process_weights_after_loading(method, layer)
    finally:
        del experts.process_weights_after_loading
    if calls or _experts_of(method) is experts:  # otherwise vLLM made a new kernel and prepared the weights for it
        prepare(layer)


def _experts_of(method: Any) -> Any:
    """Return the experts in the kernel of ``method``, a layer's quantization method; None if it has no such kernel."""
    experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)
    return experts if hasattr(experts, "process_weights_after_loading") else None
