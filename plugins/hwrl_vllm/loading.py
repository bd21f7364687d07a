"""Load versions of the weights into one worker's model: in place, or staged beside it and installed later."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hwrl.discovery import get_backend
from hwrl.weights import CopyDestination, Destination, TensorStream, WeightLayout
from hwrl_vllm.copies import CopyPlan, Recorder
from hwrl_vllm.reload import Reload

_BUCKETS = 4
"""The most buckets under way at once, if vLLM's loaders are at work."""

_log = logging.getLogger("vllm.hwrl")  # vLLM's logger shows its messages


class ModelLoading:
    """Loads whole versions into ``model``: by recorded copies, or by vLLM's loaders if these do more than copy.

    A version is loaded in one of three ways::

        load(weights)                       all tensors are here
        place(layout)                       tensors arrive, and go straight into the model
        stage(layout), install() or drop()  tensors arrive beside the model, and go into it later, or not

    After a failed load the model has weights of two versions. The next whole load repairs it.
    """

    copies: CopyPlan | None = None
    """The copies that replace the loaders; None before the first recorded load, and if loaders do more than copy."""

    def __init__(self, model: torch.nn.Module, *, model_config: Any, vllm_config: Any) -> None:
        self._model = model
        self._reload = Reload(model, model_config=model_config, vllm_config=vllm_config)
        self._is_recorded = False
        self._staged: CopyPlan | Mapping[str, torch.Tensor] | None = None

    def record(self, weights: Mapping[str, torch.Tensor], *, skips_copies: bool = False) -> None:
        """Load contiguous ``weights`` of the whole model by vLLM's loaders, and record what these do.

        With ``skips_copies`` only the dtypes and shapes of ``weights`` count. No byte is copied from them, and the
        model's weights are arbitrary afterwards. An error of a loader is then logged and not raised.
        """
        self._is_recorded = True
        recorder = Recorder(weights, skips_copies=skips_copies)
        try:
            with recorder:
                self._reload.load_all(list(weights.items()))
            self.copies = recorder.plan(self._model.parameters())
        except Exception as exc:
            if not skips_copies:
                raise
            recorder.obstacle = f"{type(exc).__name__}: {exc}"  # for example a loader that computes with the weights
        if self.copies is None:
            _log.info("updates run vLLM's loaders, because they do more than copy: %s", recorder.obstacle)

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Load contiguous ``weights`` of the whole model in place, and wait for the device."""
        if self.copies is not None and self.copies.suits(weights):
            self.copies.run(weights)
        elif self._is_recorded:
            self._reload.load_all(list(weights.items()))
        else:
            self.record(weights)
        get_backend().synchronize()  # the caller may overwrite the weights after this call

    def place(self, layout: WeightLayout) -> Destination:
        """Return the destination for versions of ``layout`` in place: the parameters themselves, or vLLM's loaders."""
        backend = get_backend()
        if self.copies is not None and self.copies.suits({entry.name for entry in layout.entries}):
            return CopyDestination(layout, self.copies.rules(), backend=backend, constants=self.copies.constants)
        return TensorStream(layout, self._reload, backend=backend, buckets=_BUCKETS)

    def stage(self, layout: WeightLayout) -> Destination:
        """Return memory beside the model as the destination for one version of ``layout``.

        It has this worker's shards if the loaders only copy, and otherwise the whole version.
        """
        backend = get_backend()
        if self.copies is not None and self.copies.suits({entry.name for entry in layout.entries}):
            self._staged = self.copies.staged()
            return CopyDestination(layout, self._staged.rules(), backend=backend)
        self._staged = layout.views(torch.empty(layout.nbytes, dtype=torch.uint8, device=backend.device()))
        return CopyDestination.into(layout, self._staged, backend=backend)

    def install(self) -> None:
        """Load the staged version, if there is one, and wait for the device."""
        if isinstance(self._staged, CopyPlan):
            assert self.copies is not None, "a staged CopyPlan comes from these copies"
            self.copies.install(self._staged)
            get_backend().synchronize()
        elif self._staged is not None:
            self.load(self._staged)
        self.drop()

    def drop(self) -> None:
        """Drop the staged version, if there is one."""
        self._staged = None
