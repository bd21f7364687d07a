"""A model's layers run on a backend's fused operations, if these compute the same."""

from __future__ import annotations

import copy
import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from hwrl.interfaces import Kernels
from hwrl.train import PolicyLoss
from hwrl.train.kernels import apply_kernels
from tests.support.fsdp_training import batch_of, engine_on, groups_of, model_directory
from tests.support.tiny_model import tiny_model

__all__ = ["model_directory"]  # a fixture

HOST = torch.device("cpu")


class Counted:
    """Right operations, and how often each was called."""

    def __init__(self) -> None:
        self.norms = self.gates = 0
        self.kernels = Kernels(rms_norm=self.rms_norm, swiglu=self.swiglu)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        self.norms += 1
        return functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def swiglu(self, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        self.gates += 1
        return functional.silu(gate) * up


def losses_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    tokens = torch.arange(24).reshape(2, 12) % 16
    loss = model(input_ids=tokens, labels=tokens).loss
    model.zero_grad()
    loss.backward()
    return {"loss": loss.detach()} | {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_a_model_computes_the_same_on_fused_operations() -> None:
    model, counted = tiny_model(), Counted()
    before = losses_and_gradients(model)
    generator = torch.get_rng_state()
    # In each of two layers two norms of the layer, two of attention's heads, and a gated layer; and the last norm.
    assert apply_kernels(model, counted.kernels, device=HOST, dtype=torch.float32) == 2 * 5 + 1
    assert torch.equal(torch.get_rng_state(), generator), "the proof must not use up random numbers"
    assert all(parameter.grad is not None for parameter in model.parameters()), "nor touch gradients"
    counted.norms = counted.gates = 0
    after = losses_and_gradients(model)
    assert (counted.norms, counted.gates) == (2 * 4 + 1, 2)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)


def test_a_copy_of_the_model_uses_its_own_weights() -> None:
    model, counted = tiny_model(), Counted()
    apply_kernels(model, counted.kernels, device=HOST, dtype=torch.float32)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert losses_and_gradients(copied)["loss"] != losses_and_gradients(model)["loss"]


def test_it_proves_each_kind_once_in_the_dtype_of_the_run() -> None:
    model, counted = tiny_model(), Counted()
    apply_kernels(model, counted.kernels, device=HOST, dtype=torch.bfloat16)
    assert (counted.norms, counted.gates) == (2, 1)  # norms over 32 and over 8 numbers
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    counted.norms = 0
    with torch.autocast("cpu", dtype=torch.bfloat16):  # weights and activations differ in dtype: the module's own way
        losses_and_gradients(model)
    assert counted.norms < 9


def with_larger_eps(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps + 0.1)


def without_gradient_of_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight.detach(), eps)


def in_another_dtype(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, (x.shape[-1],), weight, eps).double()


def without_a_compiler(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    raise OSError("there is no compiler\nhere")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (with_larger_eps, "the output of the backend's operation is off by"),
        (without_gradient_of_weight, "gives the output, the gradient of the input, and not the output, the gradient"),
        (in_another_dtype, "another shape or dtype"),
        (without_a_compiler, "raised OSError: there is no compiler"),
    ],
)
def test_a_wrong_operation_is_not_used_and_told_once(wrong: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    model, right = tiny_model(), Counted()
    before = losses_and_gradients(model)
    kernels = dataclasses.replace(right.kernels, rms_norm=wrong)
    with caplog.at_level(logging.WARNING, "hwrl.train"):
        assert apply_kernels(model, kernels, device=HOST, dtype=torch.float32) == 2  # the gated layers
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 2, "once for norms over 32 numbers, once for those over 8"
    assert all(why in text and "Qwen3RMSNorm keeps its own forward method" in text for text in warnings)
    after = losses_and_gradients(model)
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor)


def test_a_norm_of_another_formula_keeps_its_own() -> None:
    class ShiftedRMSNorm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eps, self.weight = 1e-6, torch.nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.rms_norm(x, (8,), 1 + self.weight, self.eps)

    norm = ShiftedRMSNorm()
    assert apply_kernels(norm, Counted().kernels, device=HOST, dtype=torch.float32) == 0
    assert "forward" not in vars(norm)


class BareRMSNorm(torch.nn.Module):
    eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_a_norm_without_weights_keeps_its_own() -> None:
    model = torch.nn.Sequential(BareRMSNorm())
    assert apply_kernels(model, Counted().kernels, device=HOST, dtype=torch.float32) == 0


def test_without_operations_nothing_changes() -> None:
    model = tiny_model()
    assert apply_kernels(model, Kernels(), device=HOST, dtype=torch.float32) == 0
    assert not [module for module in model.modules() if "forward" in vars(module)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_engine_uses_them_unless_told_otherwise(
    model_directory: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Counted()
    monkeypatch.setattr("hwrl.train.fsdp.kernels", lambda: counted.kernels)
    batch, metrics = batch_of(groups_of(3, seed=1)), []
    for fused in (True, False):
        engine = engine_on(model_directory, None, dtype=dtype, fused_kernels=fused)
        counted.norms = counted.gates = 0
        metrics.append(engine.train_batch(batch, loss=PolicyLoss()))
        assert [counted.norms > 0, counted.gates > 0] == [fused, fused]
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    assert metrics[0]["grad_norm"] == pytest.approx(metrics[1]["grad_norm"], rel=tolerance)
