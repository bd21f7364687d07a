"""What a backend promises about what its device computes: the numbers of the host, to rounding."""

from __future__ import annotations

import pytest
import torch

from hwrl.interfaces import Backend
from hwrl.testing.compute import ATTENTIONS, TOLERANCES, why_refused, wrong_attention, wrong_training


class ComputeContract:
    """A small model's numbers are those of the host in double precision, with room for rounding alone.

    Every device computes in float32. A device that lacks another dtype refuses it with an error.
    """

    @pytest.fixture(params=TOLERANCES, ids=str)
    def dtype(self, request: pytest.FixtureRequest, backend: Backend) -> torch.dtype:
        """A dtype that the device has."""
        dtype: torch.dtype = request.param
        refused = why_refused(backend, dtype)
        if refused and dtype is not torch.float32:
            pytest.skip(f"{backend.info.name} has no {dtype}: {refused}")
        return dtype

    @pytest.mark.parametrize("shape", ATTENTIONS)
    def test_attention_is_right(self, backend: Backend, shape: str, dtype: torch.dtype) -> None:
        """Forwards and backwards, for the shapes that training and generation use."""
        assert wrong_attention(backend, ATTENTIONS[shape], dtype) == []

    def test_a_step_of_training_is_right(self, backend: Backend, dtype: torch.dtype) -> None:
        """A tiny transformer's logits, all its gradients and, in float32, what a step of AdamW makes of its parameters.

        AdamW keeps its moments in the parameters' dtype, and in the smaller ones rounding hides the step.
        """
        assert wrong_training(backend, dtype, step=dtype is torch.float32) == []
