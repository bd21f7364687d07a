"""What hwrl adds to vLLM's workers: whole versions of weights, in the checkpoint's names, into the live model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


class WeightLoading:
    """Mixed into vLLM's worker by ``worker_extension_cls``; its methods are called by ``collective_rpc``."""

    model_runner: Any
    model_config: Any

    def hwrl_load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load ``weights``, which are the whole model's, in place; this worker takes its shards of them.

        If that fails the model holds a mixture, but can be loaded again.
        """
        try:
            self.model_runner.reload_weights(weights_iterator=weights.items())
        except BaseException:
            self._end_reload()
            raise

    def _end_reload(self) -> None:
        """Take the model out of the middle of a reload, in which its layers are on the meta device."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model_runner.get_model(), self.model_config)
