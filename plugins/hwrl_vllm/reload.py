"""vLLM's own reload of a running model. Its loaders take the tensors piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hwrl_vllm.experts import prepare_in_each_load
from hwrl_vllm.lora import loaders_names


class Reload:
    """Reloads ``model`` by vLLM's loaders: ``begin``, ``load`` for each piece, then ``finish`` or ``cancel``.

    vLLM keeps the tensors of a layer until the layer is whole. Then it loads the layer and prepares it for its kernels.
    After a cancelled reload the model has weights of two versions. The next whole reload repairs it.
    """

    def __init__(self, model: torch.nn.Module, *, model_config: Any, vllm_config: Any) -> None:
        self._model, self._model_config, self._vllm_config = model, model_config, vllm_config
        prepare_in_each_load(model)
        self._under_way = False
        self._loaders_name: Callable[[str], str] | None = None

    def begin(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        self.cancel()
        if self._loaders_name is None:
            self._loaders_name = loaders_names(self._model) if self._vllm_config.lora_config else str
        self._under_way = True
        with self._configured():
            initialize_layerwise_reload(self._model)

    def load(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        assert self._loaders_name is not None, "begin comes first"
        with self._configured():
            self._model.load_weights((self._loaders_name(name), tensor) for name, tensor in tensors)  # type: ignore[operator]  # vLLM's

    def finish(self) -> None:
        self._finalize()
        with self._configured():
            _prepare_sharing_layers(self._model)

    def cancel(self) -> None:
        if self._under_way:
            _drop_partial_layers(self._model)
            self._finalize()

    def load_all(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Load a whole version in one piece; cancel the reload after an error."""
        self.begin()
        try:
            self.load(tensors)
        except BaseException:
            self.cancel()
            raise
        self.finish()

    def _finalize(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        self._under_way = False
        with self._configured():
            finalize_layerwise_reload(self._model, self._model_config)

    def _configured(self) -> Any:
        from vllm.config import set_current_vllm_config

        return set_current_vllm_config(self._vllm_config)


def _prepare_sharing_layers(model: torch.nn.Module) -> None:
    """Prepare all layers that share a weight for their kernels again, for example an output layer and the embeddings.

    vLLM reloads only one of them. On CPUs the others would keep what they computed from the old weights.
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


def _drop_partial_layers(model: torch.nn.Module) -> None:
    """Drop the new tensors of layers that are not whole yet. Such a layer keeps its old weights."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.load_numel, info.loaded_weights = 0, []
