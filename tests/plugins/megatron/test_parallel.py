"""The Megatron engine on several real ranks: tensor and data parallel, the same steps and the same checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.checkpoint import CheckpointManager
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.interfaces import MemoryInfo, TrainEngine
from hwrl.run.demo import write_demo
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss
from tests.support.fsdp_training import without_padding
from tests.support.megatron_batches import batch_of, settings_in
from tests.support.roomy import Roomy


def train_in_parallel(
    rank: int, directory: Path, address: str, ranks: int, tensor_parallel: int, steps: range
) -> dict[str, Any]:
    """Train on one of ``ranks`` ranks; see :func:`train`."""
    from hwrl_megatron import hwrl_train_engine

    group = Comm().init_default(store=connect_store(address), rank=rank, size=ranks) if ranks > 1 else None
    engine = hwrl_train_engine(
        settings=settings_in(directory, param_offload=True, optimizer_offload=True),
        options={"tensor_parallel": tensor_parallel},
        backend=hwrl.get_backend(),
        group=group,
    )
    try:
        return train(engine, directory, steps, group=group)
    finally:
        engine.close()
        if group is not None:
            group.close()


def train(engine: TrainEngine, directory: Path, steps: range, *, group: Group | None) -> dict[str, Any]:
    """Resume from ``directory`` if there is a checkpoint, take ``steps`` and save; return metrics and weights."""
    share = slice(engine.data_parallel_rank, None, engine.data_parallel_size)
    with CheckpointManager(directory / "checkpoints", group=group, timeout_s=600) as manager:
        with engine.on_device(optimizer=True):
            state = engine.state_dict()
            if manager.resume(state) is not None:
                engine.load_state_dict(state)
        metrics = []
        for step in steps:
            with engine.on_device(optimizer=True):
                metrics.append(engine.train_batch(batch_of(share, seed=step), loss=PolicyLoss("tis")))
        with engine.on_device(optimizer=True):
            manager.save(steps.stop, engine.state_dict())
            weights = {name: tensor.cpu().clone() for name, tensor in engine.named_weights()}
            logprobs = engine.logprobs(batch_of(slice(None), seed=99))
    return {"metrics": metrics, "weights": weights, "logprobs": logprobs}


def spawn(directory: Path, *, ranks: int, tensor_parallel: int, steps: range) -> list[dict[str, Any]]:
    store = serve_store()
    address = store_address(store)
    return run_processes(train_in_parallel, ranks, directory, address, ranks, tensor_parallel, steps, timeout_s=2400)


def demo_in(directory: Path) -> Path:
    write_demo(directory, seed=3, prompts=16)
    return directory


@pytest.fixture
def straight(tmp_path: Path) -> dict[str, Any]:
    """Six steps of the FSDP2 engine on one rank."""
    directory = demo_in(tmp_path / "straight")
    engine = FsdpEngine(settings_in(directory), backend=hwrl.get_backend(), group=None)
    return train(engine, directory, range(6), group=None)


def assert_metrics(ended: list[dict[str, Any]], wanted: list[dict[str, float]]) -> None:
    for one in ended:
        for mine, expected in zip(one["metrics"], wanted, strict=True):
            assert without_padding(mine) == pytest.approx(without_padding(expected), rel=2e-3, abs=1e-5)


def assert_same_end(ended: list[dict[str, Any]], wanted: dict[str, Any]) -> None:
    assert ended[0]["weights"].keys() == wanted["weights"].keys()
    assert not any(one["weights"] for one in ended[1:]), "only the first rank has whole weights"
    for name, tensor in wanted["weights"].items():
        # Not element by element: where a gradient is nearly zero AdamW makes a step of its last bits.
        assert (ended[0]["weights"][name] - tensor).norm() <= 1e-3 * tensor.norm(), name
    for one in ended:
        torch.testing.assert_close(one["logprobs"], wanted["logprobs"], atol=5e-4, rtol=1e-3)


def test_two_tensor_times_two_data_ranks_take_the_steps_of_one(tmp_path: Path, straight: dict[str, Any]) -> None:
    ended = spawn(demo_in(tmp_path / "four"), ranks=4, tensor_parallel=2, steps=range(6))
    assert_metrics(ended, straight["metrics"])
    assert_same_end(ended, straight)


@pytest.mark.extended  # test_sharded.py and test_stages.py go on from checkpoints of other layouts
def test_the_curve_goes_on_from_one_tensor_rank_to_two_and_back(tmp_path: Path, straight: dict[str, Any]) -> None:
    directory = demo_in(tmp_path / "changing")
    stages = [
        [train_in_parallel(0, directory, "", 1, 1, range(2))],
        spawn(directory, ranks=2, tensor_parallel=2, steps=range(2, 4)),
        [train_in_parallel(0, directory, "", 1, 1, range(4, 6))],
    ]
    for number, ended in enumerate(stages):
        assert_metrics(ended, straight["metrics"][2 * number : 2 * number + 2])
    assert_same_end(stages[-1], straight)


class Uneven(Roomy):
    """Has ``usable`` bytes left."""

    usable = 1 << 40

    def memory_info(self) -> MemoryInfo:
        return replace(super().memory_info(), free_nbytes=self.usable)


def train_with_uneven_room(rank: int, directory: Path, address: str, setting: Any) -> dict[str, Any]:
    """Take a step to measure and one where only the first rank has room."""
    from hwrl_megatron import hwrl_train_engine

    backend = Uneven()
    group = Comm().init_default(store=connect_store(address), rank=rank, size=2)
    settings = settings_in(directory, activation_checkpointing=setting)
    options = {"tensor_parallel": 2}
    engine: Any = hwrl_train_engine(settings=settings, options=options, backend=backend, group=group)
    try:
        engine.train_batch(batch_of(slice(None), seed=0), loss=PolicyLoss())
        backend.usable = -(1 << 40) if rank else 1 << 40
        metrics = engine.train_batch(batch_of(slice(None), seed=1), loss=PolicyLoss())
        return {"metrics": metrics, "recomputed": engine.checkpointing.recomputed}
    finally:
        engine.close()
        group.close()


def test_ranks_of_a_layer_recompute_the_same_layers(tmp_path: Path) -> None:
    directory, found = demo_in(tmp_path), {}
    for setting in ("auto", False):
        store = serve_store()  # of its own: default groups of one process and one store would meet each other's keys
        found[setting] = run_processes(
            train_with_uneven_room, 2, directory, store_address(store), setting, timeout_s=1200
        )
    for auto, plain in zip(found["auto"], found[False], strict=True):
        assert (auto["recomputed"], plain["recomputed"]) == (2, 0)
        assert auto["metrics"] == pytest.approx(plain["metrics"], rel=1e-5, abs=1e-7)
