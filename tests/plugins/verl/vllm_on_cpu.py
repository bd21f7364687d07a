"""verl's extension of vLLM's workers, for CPUs: vLLM keeps the weights, which verl's updates overwrite."""

# mypy: disable-error-code="misc, no-any-return"
# verl's types are not followed.

from __future__ import annotations

from typing import Any

import torch
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.model_executor.layers import utils as layers


class Extension(vLLMColocateWorkerExtension):
    """Selected by ``rollout.engine_kwargs.vllm.worker_extension_cls``."""

    def __new__(cls, **options: Any) -> Extension:
        layers.dispatch_cpu_unquantized_gemm = _use_torchs_linear
        return super().__new__(cls, **options)


def _use_torchs_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    """Stand in for vLLM's function: that one packs a layer's weights for its kernels, and drops them."""
    setattr(layer, "cpu_linear", torch.nn.functional.linear)  # noqa: B010 - no attribute that torch's types know
