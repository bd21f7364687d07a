"""hwrl's extension of vLLM's workers: load a whole version of the weights into the running model."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.discovery import get_backend
from hwrl.interfaces import Backend
from hwrl_vllm.copies import CopyPlan, Recorder
from hwrl_vllm.experts import experts_prepared
from hwrl_vllm.lora import keep_indices, layers_without_place, replace_adapter, with_loaders_names

_log = logging.getLogger("vllm.hwrl")  # vLLM shows its messages


@dataclass(frozen=True)
class LentWeights:
    """Tensors in the rollout process's memory, one handle for each storage; a worker process can open them."""

    handles: list[dict[str, str | int]]
    places: dict[str, tuple[int, int, torch.dtype, torch.Size]]
    """For each tensor: the number of its handle, its first byte, dtype and shape."""

    @classmethod
    def of(cls, weights: Mapping[str, torch.Tensor], backend: Backend) -> LentWeights:
        """Lend ``weights``, contiguous and not empty, as long as they exist."""
        handles: dict[int, dict[str, str | int]] = {}
        places = {}
        for name, tensor in weights.items():
            storage = tensor.untyped_storage()
            if storage._cdata not in handles:
                memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                handles[storage._cdata] = backend.export_memory(memory)
            number = list(handles).index(storage._cdata)
            begin = int(tensor.storage_offset()) * tensor.itemsize
            places[name] = (number, begin, tensor.dtype, tensor.shape)
        return cls(list(handles.values()), places)

    def open(self, backend: Backend) -> dict[str, torch.Tensor]:
        """Return the tensors, in another process."""
        opened = [backend.open_memory(handle) for handle in self.handles]
        return {
            name: opened[number][begin : begin + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for name, (number, begin, dtype, shape) in self.places.items()
        }


class WeightLoading:
    """A mixin of vLLM's worker (``worker_extension_cls``). ``collective_rpc`` calls its methods."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    _hwrl_copies: CopyPlan | None = None
    _hwrl_recorded = False

    def hwrl_load_lent(self, method: str, pickled: bytes) -> None:
        """Call ``method`` with the weights of another process: ``pickled`` are LentWeights, and further arguments."""
        lent, args = pickle.loads(pickled)
        getattr(self, method)(lent.open(get_backend()), *args)

    def hwrl_load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load contiguous ``weights`` of the whole model, in place; each worker takes its shards. Blocks.

        After a failure the model is a mixture of versions; another load repairs it.
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
                _log.info("updates run vLLM's loaders, because they do more than copy: %s", recorder.obstacle)
        get_backend().synchronize()  # then the lender may overwrite them

    def hwrl_load_adapter(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Load ``weights`` (PEFT's names), a whole adapter with PEFT's ``config``. Blocks."""
        replace_adapter(self.model_runner.lora_manager, weights, config)
        get_backend().synchronize()

    def hwrl_layers_without_place(self, names: Collection[str]) -> list[str]:
        """Return the layers in ``names`` (an adapter's tensors) that cannot have an adapter in this model."""
        return layers_without_place(self.model_runner.lora_manager, names)

    def hwrl_free_nbytes(self) -> int:
        """Return the free bytes of this worker's device."""
        return get_backend().memory_info().free_nbytes

    def hwrl_prepare_sleep(self) -> None:
        """Prepare for sleep: keep index tensors, and use hwrl's sleep backend if this vLLM supports one."""
        keep_indices(self.model_runner.get_model())
        if hasattr(self, "_sleep_mode_backend"):
            from hwrl_vllm.sleep import pooled_sleep

            self._sleep_mode_backend = pooled_sleep(self.model_config)

    def _hwrl_reload(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Run the model's loaders, and prepare each layer's weights for its kernels."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload.layerwise import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        model = self.model_runner.get_model()
        if self.vllm_config.lora_config:
            weights = with_loaders_names(model, weights)
        with set_current_vllm_config(self.vllm_config), experts_prepared(model):
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
    """Prepare layers with shared weights again, such as an output layer with the embeddings.

    vLLM reloads one of them. On CPUs the others keep what they computed from the old weights.
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
    """Drop the partial weights of layers that wait for the rest; such a layer keeps its old weights."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        waiting = get_layerwise_info(layer)
        waiting.load_numel, waiting.loaded_weights = 0, []
