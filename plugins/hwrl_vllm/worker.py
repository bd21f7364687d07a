"""What hwrl adds to vLLM's workers: they load a whole version of the weights into the live model."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.discovery import get_backend
from hwrl.interfaces import Backend
from hwrl_vllm.copies import CopyPlan, Recorder
from hwrl_vllm.lora import keep_indices, layers_without_place, replace_adapter, with_loaders_names

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Lent:
    """A tensor in the memory of the rollout process, as a worker process can open it."""

    handle: dict[str, str | int]
    dtype: torch.dtype
    shape: torch.Size

    @classmethod
    def of(cls, tensor: torch.Tensor, backend: Backend) -> Lent:
        """Lend ``tensor``, which is contiguous and not empty, for as long as it lives."""
        return cls(backend.export_memory(tensor), tensor.dtype, tensor.shape)

    def open(self, backend: Backend) -> torch.Tensor:
        """Return the tensor, in another process."""
        return backend.open_memory(self.handle).view(self.dtype).view(self.shape)


class WeightLoading:
    """Mixed into vLLM's worker by ``worker_extension_cls``; its methods are called by ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _hwrl_copies: CopyPlan | None = None
    _hwrl_recorded = False

    def hwrl_load_lent(self, method: str, weights: Mapping[str, Lent], *args: Any) -> None:
        """Call ``method`` with weights that another process lends, and ``args``."""
        backend = get_backend()
        getattr(self, method)({name: lent.open(backend) for name, lent in weights.items()}, *args)

    def hwrl_load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load contiguous ``weights``, the whole model's, in place; a worker takes its shards of them. Blocks.

        If that fails the model holds a mixture, but can be loaded again.
        """
        if self._hwrl_copies is not None and self._hwrl_copies.suits(weights):
            self._hwrl_copies.run(weights)
        elif self._hwrl_recorded:
            self._hwrl_reload(weights)
        else:
            with Recorder(weights) as recorder:
                self._hwrl_reload(weights)
            self._hwrl_copies = recorder.plan(self.model_runner.get_model().parameters())
            self._hwrl_recorded = True
            if self._hwrl_copies is None:
                _log.info("updates run vLLM's loaders, as they do more than copy: %s", recorder.obstacle)
        get_backend().synchronize()  # the lender may write there again

    def hwrl_load_adapter(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Load ``weights`` (PEFT's names), a whole adapter of the form that PEFT's ``config`` says. Blocks."""
        replace_adapter(self.model_runner.lora_manager, weights, config)
        get_backend().synchronize()

    def hwrl_layers_without_place(self, names: Collection[str]) -> list[str]:
        """Return the layers of an adapter of tensors ``names`` (PEFT's) in which this model can have none."""
        return layers_without_place(self.model_runner.lora_manager, names)

    def hwrl_free_nbytes(self) -> int:
        """Return the free memory of this worker's device."""
        return get_backend().memory_info().free_nbytes

    def hwrl_prepare_sleep(self) -> None:
        """Let sleep keep what it must, in hwrl's memory if this version of vLLM lets others keep the weights."""
        keep_indices(self.model_runner.get_model())
        if hasattr(self, "_sleep_mode_backend"):
            from hwrl_vllm.sleep import pooled_sleep

            self._sleep_mode_backend = pooled_sleep(self.model_config)

    def _hwrl_reload(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the model's loaders, and what prepares a layer's weights for its kernels."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        if self.vllm_config.lora_config:
            weights = with_loaders_names(model, weights)
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights.items())
            except BaseException:
                _forget_waiting(model)
                raise
            finally:
                finalize_layerwise_reload(model, self.model_config)
            _prepare_sharing_layers(model)


def _prepare_sharing_layers(model: torch.nn.Module) -> None:
    """Prepare again the layers that share their weights, as an output layer may with the embeddings.

    vLLM reloads one of them, and leaves in the others what they made of the weights before, as on CPUs they do.
    """
    sharing: dict[int, list[Any]] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None and getattr(layer, "quant_method", None) is not None:
            sharing.setdefault(id(weight), []).append(layer)
    for layers in sharing.values():
        if len(layers) > 1:
            for layer in layers:
                layer.quant_method.process_weights_after_loading(layer)


def _forget_waiting(model: torch.nn.Module) -> None:
    """Forget what was given to layers that wait for more of their weights: they get back those of before."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        waiting = get_layerwise_info(layer)
        waiting.load_numel, waiting.loaded_weights = 0, []
