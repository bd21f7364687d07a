"""The contract of the device's arithmetic: the host's numbers, up to rounding."""

from __future__ import annotations

import pytest
import torch

from hwrl.interfaces import Backend
from hwrl.testing.compute import ATTENTIONS, TOLERANCES, why_refused, wrong_attention, wrong_training
from hwrl.testing.varlen import PACKED, wrong_varlen


class ComputeContract:
    """A small model computes the host's double-precision numbers, up to rounding.

    Every device computes in float32. It refuses unsupported dtypes with an error.
    """

    @pytest.fixture(params=TOLERANCES, ids=str)
    def dtype(self, request: pytest.FixtureRequest, backend: Backend) -> torch.dtype:
        """A dtype supported by the device."""
        dtype: torch.dtype = request.param
        refused = why_refused(backend, dtype)
        if refused and dtype is not torch.float32:
            pytest.skip(f"{backend.info.name} has no {dtype}: {refused}")
        return dtype

    @pytest.mark.parametrize("shape", ATTENTIONS)
    def test_attention_is_right(self, backend: Backend, shape: str, dtype: torch.dtype) -> None:
        """Forward and backward, for the shapes of training and generation."""
        assert wrong_attention(backend, ATTENTIONS[shape], dtype) == []

    @pytest.mark.parametrize("pack", PACKED)
    def test_varlen_attention_is_right(self, backend: Backend, pack: str, dtype: torch.dtype) -> None:
        """Forward and backward; a sequence does not see its neighbours."""
        assert wrong_varlen(backend, PACKED[pack], dtype) == []

    def test_a_step_of_training_is_right(self, backend: Backend, dtype: torch.dtype) -> None:
        """A tiny transformer's logits, its gradients and, in float32, its parameters after a step of AdamW.

        AdamW keeps its moments in the parameters' dtype. In smaller dtypes rounding hides the step.
        """
        assert wrong_training(backend, dtype, step=dtype is torch.float32) == []
