"""A frozen model, for the divergence of the policy from it: :class:`ReferenceModel`."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from hwrl.interfaces import Backend, EngineSettings
from hwrl.train.fsdp import FsdpEngine

if TYPE_CHECKING:
    from hwrl.comm import Group


class ReferenceModel(FsdpEngine):
    """The model in ``settings.model_directory``, frozen in ``settings.dtype``: it computes log-probabilities only.

    It is sharded like the policy, and each rank reads its own part. Its parameters are in host memory outside
    :meth:`on_device`; if the device is the host, they stay where they are. Ranks gather its weights layer by layer.
    """

    def __init__(self, settings: EngineSettings, *, backend: Backend, group: Group | None) -> None:
        on_host = settings.host_step or backend.device().type == torch.device("cpu").type
        frozen = replace(settings, lora=None, param_offload=not on_host, optimizer_offload=False)
        super().__init__(frozen, backend=backend, group=group)

    def _adapted(self, model: Any) -> Any:
        for parameter in model.parameters():
            parameter.requires_grad_(False)
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(self.settings.dtype)
        return model

    def _usable_nbytes(self, *, vocabulary: int) -> int:
        return 0  # nothing stays whole between its passes: the policy's step needs the memory
