"""The contract of the device's arithmetic: the host's numbers, up to rounding."""

from __future__ import annotations

import math
from typing import ClassVar

import pytest
import torch

from hwrl.discovery import Registry
from hwrl.interfaces import Backend, Capability, Kernels
from hwrl.testing.compute import (
    ATTENTIONS,
    ROWS,
    TOLERANCES,
    why_refused,
    wrong_attention,
    wrong_compiled,
    wrong_rms_norm,
    wrong_swiglu,
    wrong_training,
)
from hwrl.testing.contracts.need import need_claim
from hwrl.testing.levels import Level
from hwrl.testing.varlen import PACKED, why_not_fused, wrong_varlen


class _InEachDtype:
    """Every device computes in float32. It refuses unsupported dtypes with an error."""

    @pytest.fixture(params=TOLERANCES, ids=str)
    def dtype(self, request: pytest.FixtureRequest, backend: Backend) -> torch.dtype:
        """A dtype supported by the device."""
        dtype: torch.dtype = request.param
        refused = why_refused(backend, dtype)
        if refused and dtype is not torch.float32:
            pytest.skip(f"{backend.info.name} has no {dtype}: {refused}")
        return dtype


class ComputeContract(_InEachDtype):
    """A small model computes the host's double-precision numbers, up to rounding."""

    level: ClassVar[Level] = Level.COMPUTE

    @pytest.mark.parametrize("shape", ATTENTIONS)
    def test_attention_is_right(self, backend: Backend, shape: str, dtype: torch.dtype) -> None:
        """Forward and backward, for the shapes of training and generation."""
        assert wrong_attention(backend, ATTENTIONS[shape], dtype) == []

    @pytest.mark.parametrize("pack", PACKED)
    def test_varlen_attention_is_right(self, backend: Backend, pack: str, dtype: torch.dtype) -> None:
        """Forward and backward; a sequence does not see its neighbours."""
        assert wrong_varlen(backend, PACKED[pack], dtype) == []

    def test_claimed_varlen_attention_is_fused(self, backend: Backend) -> None:
        """In some dtype, a few operations compute all sequences, without rows of the longest one's length."""
        need_claim(backend, Capability.VARLEN_ATTENTION)
        wrong = {dtype: why_not_fused(backend, dtype) for dtype in TOLERANCES if not why_refused(backend, dtype)}
        assert "" in wrong.values(), f"it is claimed, and not there: {wrong}"

    def test_claimed_compiled_training_is_right_and_pays(self, backend: Backend) -> None:
        """A compiled chain of operations and its gradients are right, and faster than the same chain uncompiled."""
        need_claim(backend, Capability.COMPILED_TRAINING)
        assert wrong_compiled(backend) == []

    def test_a_step_of_training_is_right(self, backend: Backend, dtype: torch.dtype) -> None:
        """A tiny transformer's logits, its gradients and, in float32, its parameters after a step of AdamW.

        AdamW keeps its moments in the parameters' dtype. In smaller dtypes rounding hides the step.
        """
        assert wrong_training(backend, dtype, step=dtype is torch.float32) == []

    def test_its_peak_is_a_number_or_unknown(self, backend: Backend, dtype: torch.dtype) -> None:
        """FLOP/s, not TFLOP/s: no accelerator has less than 10 ** 11."""
        peak = backend.peak_flops(dtype)
        assert peak is None or (isinstance(peak, float) and 1e11 < peak < math.inf)


class KernelsContract(_InEachDtype):
    """Each fused operation of the hook ``hwrl_kernels`` computes its definition, up to rounding."""

    level: ClassVar[Level] = Level.COMPUTE

    @pytest.fixture
    def kernels(self, backend: Backend) -> Kernels:
        """The answer of the backend's hook."""
        registry = Registry(env={})
        registry.set_backend(backend)
        return registry.kernels()

    @pytest.mark.parametrize("rows", ROWS)
    def test_rms_norm_is_right(self, backend: Backend, kernels: Kernels, rows: str, dtype: torch.dtype) -> None:
        """Forward and backward."""
        if kernels.rms_norm is None:
            pytest.skip(f"{backend.info.name} brings no rms_norm")
        assert wrong_rms_norm(backend, kernels.rms_norm, ROWS[rows], dtype) == []

    @pytest.mark.parametrize("rows", ROWS)
    def test_swiglu_is_right(self, backend: Backend, kernels: Kernels, rows: str, dtype: torch.dtype) -> None:
        """Forward and backward."""
        if kernels.swiglu is None:
            pytest.skip(f"{backend.info.name} brings no swiglu")
        assert wrong_swiglu(backend, kernels.swiglu, ROWS[rows], dtype) == []
