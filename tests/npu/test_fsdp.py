"""FSDP2 over HCCL takes the steps that one host takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hwrl.comm import serve_store, store_address
from hwrl.testing.processes import run_processes
from tests.support.fsdp_training import model_directory, train, without_padding

__all__ = ["model_directory"]  # a fixture

_STEPS = 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_ranks_take_the_steps_of_the_host(model_directory: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve_store()
    sharded = run_processes(train, ranks, model_directory, store_address(store), ranks, _STEPS, timeout_s=120.0)
    monkeypatch.setenv("HWRL_BACKEND", "cpu")
    (alone,) = run_processes(train, 1, model_directory, "", 1, _STEPS)
    assert sharded[0]["weights"].keys() == alone["weights"].keys()
    for name, tensor in alone["weights"].items():
        # A twentieth of a step: AdamW's first steps magnify rounding where the gradient is next to zero.
        torch.testing.assert_close(sharded[0]["weights"][name], tensor, atol=5e-4, rtol=1e-3)
    for one in sharded:
        torch.testing.assert_close(one["logprobs"], alone["logprobs"], atol=5e-4, rtol=1e-3)
        for metrics, wanted in zip(one["metrics"], alone["metrics"], strict=True):
            assert without_padding(metrics) == pytest.approx(without_padding(wanted), rel=2e-3, abs=1e-5)
