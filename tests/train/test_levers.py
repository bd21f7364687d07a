"""Copies of a sharded model (HSDP), and the optimizer's step on the host: the same steps as one plain rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard

from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, HashStore, serve_store, store_address
from hwrl.errors import ConfigError, DataError
from hwrl.interfaces import LoraSettings
from hwrl.models import load_model
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss
from tests.support.fsdp_training import assert_same_training, batch_of, engine_on, groups_of, join, without_padding

WAYS: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "HSDP": {"shard_ranks": 2},
    "whole copies": {"shard_ranks": 1},
    "host step": {"host_step": True},
    "HSDP, host step": {"shard_ranks": 2, "host_step": True},
}


def steps(engine: FsdpEngine, rank: int, ranks: int, numbers: range) -> list[dict[str, float]]:
    return [
        without_padding(engine.train_batch(batch_of(groups_of(5, seed=number)[rank::ranks]), loss=PolicyLoss()))
        for number in numbers
    ]


def weights_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu().clone() for name, tensor in engine.named_weights()}


def train_in_all_ways(rank: int, model_directory: Path, address: str, checkpoints: Path) -> dict[str, Any]:
    """Take three steps in each way on four ranks; save HSDP's state after them, and a model."""
    group = join(rank, address, 4)
    results = {}
    for way, settings in WAYS.items():
        engine = engine_on(model_directory, group, **settings)
        metrics = steps(engine, rank, 4, range(3))
        results[way] = {"metrics": metrics, "weights": weights_of(engine)}
        placements = {parameter.placements for parameter in engine.model.parameters()}
        copies = (Replicate(), Shard(0)) if "shard_ranks" in settings else (Shard(0),)
        assert placements == {copies}
        if way == "HSDP":
            engine.export(checkpoints / "exported")
            with CheckpointManager(checkpoints, group=group) as manager, engine.saved_state() as (state, _):
                manager.save(3, state)
            results["next"] = {"metrics": steps(engine, rank, 4, range(3, 5)), "weights": weights_of(engine)}
    assert group is not None
    group.close()
    return results


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def on_four_ranks(model_directory: Path, checkpoints: Path) -> list[dict[str, Any]]:
    store = serve_store()
    return run_processes(train_in_all_ways, 4, model_directory, store_address(store), checkpoints)


@pytest.fixture(scope="module")
def alone(model_directory: Path) -> dict[str, Any]:
    engine = engine_on(model_directory, None)
    return {"metrics": steps(engine, 0, 1, range(3)), "weights": weights_of(engine)}


@pytest.mark.parametrize("way", WAYS)
def test_four_ranks_take_the_steps_of_one_in_each_way(
    on_four_ranks: list[dict[str, Any]], alone: dict[str, Any], way: str
) -> None:
    first, *others = on_four_ranks
    assert_same_training(first[way], alone)
    assert not any(other[way]["weights"] for other in others)  # the first rank has them whole, once


def test_a_checkpoint_of_copies_continues_on_one_rank(
    on_four_ranks: list[dict[str, Any]], model_directory: Path, checkpoints: Path
) -> None:
    engine = engine_on(model_directory, None)
    with CheckpointManager(checkpoints) as manager:
        state = engine.state_dict()
        assert manager.resume(state) is not None
        engine.load_state_dict(state)
    found = {"metrics": steps(engine, 0, 1, range(3, 5)), "weights": weights_of(engine)}
    assert_same_training(found, on_four_ranks[0]["next"])


def test_several_ranks_export_what_transformers_loads(
    on_four_ranks: list[dict[str, Any]], model_directory: Path, checkpoints: Path
) -> None:
    loaded = load_model(checkpoints / "exported", dtype=torch.float32)
    wanted = on_four_ranks[0]["HSDP"]["weights"]
    assert {name for name, _ in loaded.named_parameters()} == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in loaded.named_parameters())
    original = load_model(model_directory, dtype=torch.float32)
    configs = [{**model.config.to_dict(), "_name_or_path": None} for model in (loaded, original)]
    assert configs[0] == configs[1]
    assert loaded.generation_config.to_dict() == original.generation_config.to_dict()


def groups_after_engines(rank: int, model_directory: Path) -> tuple[bool, bool]:
    """Return whether there is a default group after an engine that found one, and after an engine that failed."""
    with Comm().init_default(store=HashStore(), rank=0, size=1):
        engine_on(model_directory, None, host_step=True).close()
        after_one = torch.distributed.is_initialized()
    with pytest.raises(DataError):
        engine_on(model_directory / "nothing", None, host_step=True)
    return after_one, torch.distributed.is_initialized()


def test_a_step_on_the_host_uses_the_default_group_that_there_is(model_directory: Path) -> None:
    """As where a Megatron engine, or the user's own loop, made one. It stays; the engine's own one ends with it."""
    assert run_processes(groups_after_engines, 1, model_directory, timeout_s=1200.0) == [(True, False)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_rank_that_steps_on_the_host_takes_the_same_steps(model_directory: Path, dtype: torch.dtype) -> None:
    plain = engine_on(model_directory, None, dtype=dtype)
    wanted = steps(plain, 0, 1, range(2))
    engine = engine_on(model_directory, None, dtype=dtype, host_step=True)
    try:
        found = steps(engine, 0, 1, range(2))
        assert all(parameter.device.type == "cpu" for parameter in engine.model.parameters())
        assert all(state["exp_avg"].device.type == "cpu" for state in engine.optimizer.state.values())
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=2e-3 if dtype == torch.float32 else 0.05, abs=1e-5)
        if dtype == torch.float32:
            assert_same_training(
                {"metrics": [], "weights": weights_of(engine)}, {"metrics": [], "weights": weights_of(plain)}
            )
    finally:
        engine.close()


def base_of(rank: int, model_directory: Path, address: str) -> dict[str, Any]:
    group = join(rank, address, 2)
    engine = engine_on(model_directory, group, lora=LoraSettings(rank=4, alpha=8.0), dtype=torch.bfloat16)
    before = weights_of(engine)
    adapter = {name: tensor.clone() for name, tensor in engine.named_adapter()}
    metrics = steps(engine, rank, 2, range(2))
    dtypes = {str(parameter.dtype): parameter.requires_grad for parameter in engine.model.parameters()}
    state = engine.state_dict()["model"]
    assert group is not None
    group.close()
    return {"before": before, "adapter": adapter, "metrics": metrics, "dtypes": dtypes, "saved": sorted(state)}


def test_a_frozen_base_is_held_in_the_dtype_of_the_computation(model_directory: Path) -> None:
    alone = engine_on(model_directory, None, lora=LoraSettings(rank=4, alpha=8.0), dtype=torch.bfloat16)
    wanted_adapter = {name: tensor.clone() for name, tensor in alone.named_adapter()}
    wanted = steps(alone, 0, 1, range(2))
    store = serve_store()
    pair = run_processes(base_of, 2, model_directory, store_address(store))
    original = load_model(model_directory, dtype=torch.bfloat16).state_dict()
    for one in pair:
        assert one["dtypes"] == {"torch.bfloat16": False, "torch.float32": True}
        assert len(one["saved"]) == len(wanted_adapter), "a checkpoint holds the adapter alone"
        for mine, theirs in zip(one["metrics"], wanted, strict=True):
            assert mine == pytest.approx(theirs, rel=0.05, abs=1e-3)
    assert all(torch.equal(tensor, original[name]) for name, tensor in pair[0]["before"].items())
    assert all(torch.equal(tensor, wanted_adapter[name]) for name, tensor in pair[0]["adapter"].items())


def test_a_host_step_and_offloads_are_refused_together(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="host_step cannot be combined"):
        engine_on(model_directory, None, host_step=True, optimizer_offload=True)
