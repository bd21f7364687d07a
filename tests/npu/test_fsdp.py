"""FSDP2 over HCCL takes the steps that one host takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.comm import serve_store, store_address
from hwrl.testing.processes import run_processes
from hwrl.train import PolicyLoss
from tests.support.fsdp_training import (
    batch_of,
    engine_on,
    groups_of,
    join,
    model_directory,
    train,
    without_padding,
)

__all__ = ["model_directory"]  # a fixture

_STEPS = 4


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.extended)])
def test_ranks_take_the_steps_of_the_host(model_directory: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = serve_store()
    sharded = run_processes(train, ranks, model_directory, store_address(store), ranks, _STEPS, timeout_s=1200.0)
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


def step_on(rank: int, model_directory: Path, address: str, host_step: bool) -> dict[str, Any]:
    """Take two steps on two ranks, with the optimizer on the device or on the host."""
    group = join(rank, address, 2)
    assert group is not None
    engine = engine_on(model_directory, group, host_step=host_step)
    for number in range(2):
        metrics = engine.train_batch(batch_of(groups_of(5, seed=number)[rank::2]), loss=PolicyLoss())
    sent = {name: (tensor.device.type, tensor.cpu()) for name, tensor in engine.named_weights()}
    places = {one.to_local().device.type for one in engine.model.parameters()}
    group.close()
    return {"metrics": without_padding(metrics), "sent": sent, "places": places}


def test_the_optimizer_steps_on_the_host_as_on_the_device(model_directory: Path) -> None:
    stores = [serve_store(), serve_store()]
    plain, on_host = (
        run_processes(step_on, 2, model_directory, store_address(store), host_step, timeout_s=1200.0)
        for store, host_step in zip(stores, (False, True), strict=True)
    )
    assert [one["places"] for one in plain] == [{"npu"}] * 2
    assert [one["places"] for one in on_host] == [{"cpu"}] * 2
    assert on_host[0]["metrics"] == pytest.approx(plain[0]["metrics"], rel=2e-3, abs=1e-5)
    for name, (place, tensor) in on_host[0]["sent"].items():
        assert place == "npu"
        torch.testing.assert_close(tensor, plain[0]["sent"][name][1], atol=5e-4, rtol=1e-3)
