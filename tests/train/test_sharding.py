"""FSDP2 on two ranks: what stays whole between the passes of a step changes traffic and memory, and no step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.interfaces import LossInputs
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, MicroBatch, PolicyLoss
from hwrl.train.activations import ranks_on_device
from tests.support.fsdp_training import batch_of, engine_on, groups_of, join
from tests.support.near import assert_near

MODES = [(False, False), (True, False), (True, True)]
"""Whole weights, and whole gradients."""


class Traffic(TorchDispatchMode):
    """Counts the collectives."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # torch does not annotate it
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._schema.name.removeprefix("c10d::").strip("_")] += 1
        return func(*args, **(kwargs or {}))


def modes(rank: int, model_directory: Path, address: str) -> list[dict[str, Any]]:
    group = join(rank, address, 2)
    results = []
    for weights, gradients in MODES:
        engine = engine_on(model_directory, group, micro_batch_tokens=40)
        assert engine.sharded is not None
        assert engine.sharded.keeps_weights and engine.sharded.keeps_gradients  # a tiny model fits
        if not weights:
            engine = without_whole_weights(model_directory, group)
        assert engine.sharded is not None
        engine.sharded.keeps_gradients = gradients
        results.append(steps(engine, rank))
    if group is not None:
        group.close()
    return results


def without_whole_weights(model_directory: Path, group: Any) -> FsdpEngine:
    """Return an engine that had no room."""
    backend = hwrl.get_backend()
    full = replace(backend.memory_info(), free_nbytes=0, total_nbytes=0, allocated_nbytes=0, reserved_nbytes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "memory_info", lambda: full)
        engine = engine_on(model_directory, group, micro_batch_tokens=40)
    assert engine.sharded is not None and not engine.sharded.keeps_weights
    return engine


def steps(engine: FsdpEngine, rank: int) -> dict[str, Any]:
    """Take two steps with a scoring pass between them; count the collectives of the last one."""
    metrics = []
    for seed in range(2):
        batch = batch_of(groups_of(5, seed=seed)[rank::2])  # uneven: one rank has fewer passes
        logprobs = engine.logprobs(batch)
        with Traffic() as traffic:
            metrics.append(engine.train_batch(batch, loss=PolicyLoss()))
    weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
    return {"metrics": metrics, "weights": weights, "logprobs": logprobs, "counts": traffic.counts}


def test_whole_weights_and_gradients_save_traffic_and_change_no_step(model_directory: Path) -> None:
    store = serve_store()
    for results in run_processes(modes, 2, model_directory, store_address(store)):
        first, *others = results
        for other in others:
            for mine, theirs in zip(first["metrics"], other["metrics"], strict=True):
                assert theirs == pytest.approx(mine, rel=1e-4, abs=1e-6)
            assert_near(other["logprobs"], first["logprobs"])
            assert_near(other["weights"], first["weights"], share=1e-3)
        gathers = [one["counts"]["allgather_base"] for one in results]
        scatters = [one["counts"]["reduce_scatter_base"] for one in results]
        groups = 3  # two layers and the rest
        assert gathers[1] == gathers[2] == groups < gathers[0], results[0]["counts"]
        assert scatters[2] == groups < scatters[0] == scatters[1], results[0]["counts"]


def failures(rank: int, model_directory: Path, address: str) -> dict[str, Any]:
    """Fail in the second pass of a step, then take a whole one; note what is owed at the start of each pass."""
    group = join(rank, address, 2)
    engine = engine_on(model_directory, group, micro_batch_tokens=40)
    fresh = engine_on(model_directory, group, micro_batch_tokens=40)
    sharded, batch = engine.sharded, batch_of(groups_of(5, seed=0))
    assert sharded is not None and sharded.keeps_gradients
    rest, owed = iter(range(2)), []
    real = PolicyLoss()

    class FailsInTheSecondPass(PolicyLoss):
        def __call__(self, inputs: LossInputs, /) -> Any:
            if next(rest, None) is None:
                raise ValueError("a bad row")
            return real(inputs)

    with pytest.raises(ValueError, match="a bad row"):
        engine.train_batch(batch, loss=FailsInTheSecondPass())
    forward = engine.forward

    def noting(part: MicroBatch) -> Any:
        owed.append((sharded.owed_nbytes, engine.owed_nbytes()))
        return forward(part)

    engine.forward = noting  # type: ignore[method-assign] # to look into each pass
    metrics = engine.train_batch(batch, loss=real)
    wanted = fresh.train_batch(batch, loss=real)
    found = {
        "norms": (metrics["grad_norm"], wanted["grad_norm"]),
        "owed": owed,
        "numbers": sum(one.numel() for one in engine.model.parameters()),
        "on_device": ranks_on_device(group, hwrl.get_backend()),
    }
    if group is not None:
        group.close()
    return found


def test_a_failed_step_leaves_no_gradients_and_each_pass_owes_what_is_missing(model_directory: Path) -> None:
    store = serve_store()
    for found in run_processes(failures, 2, model_directory, store_address(store)):
        assert found["norms"][0] == pytest.approx(found["norms"][1], rel=1e-5)
        whole = 4 * found["numbers"]
        (extra, owed), *others = found["owed"]
        assert extra == 2 * whole  # weights and gradients
        assert 3 * whole / 2 * 0.9 < owed - extra < 3 * whole / 2 * 1.1  # its shard of the gradients and moments
        assert others and all(one == (0, owed - extra) for one in others)
        if hwrl.get_backend().info.device_type == "cpu":
            assert found["on_device"] == 2
