"""FSDP2 engines on the demo's model, and prompt groups to train them on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

import hwrl
from hwrl.comm import Comm, Group, connect_store
from hwrl.interfaces import Batch, EngineSettings, PromptGroup, Response
from hwrl.run.demo import write_demo
from hwrl.train import FsdpEngine, MicroBatch, PolicyLoss
from hwrl.train.advantages import group_advantages
from hwrl.train.batches import collate
from hwrl.train.packing import make_pack
from tests.support.near import assert_near
from tests.support.single_turns import join_responses


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=3, prompts=16)
    return directory / "model"


@pytest.fixture(scope="module")
def mixture_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of 5 experts: two ranks share them unevenly."""
    directory = tmp_path_factory.mktemp("mixture")
    write_demo(directory, seed=3, prompts=16, experts=5)
    return directory / "model"


def groups_of(count: int, *, seed: int) -> list[PromptGroup]:
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        responses = []
        for _ in range(4):
            length = int(rng.integers(1, 7))
            responses.append(
                Response(
                    rng.integers(3, 13, size=length).astype(np.int32),
                    np.full(length, -2.7, dtype=np.float32),
                    np.zeros(length, dtype=np.int32),
                    truncated=False,
                )
            )
        groups.append(
            join_responses(
                responses,
                sequence_number=number,
                lease_id=number,
                incarnation=0,
                prompt_ids=rng.integers(3, 13, size=int(rng.integers(2, 6))).astype(np.int32),
                rewards=rng.random(4).tolist(),
                metrics={},
            )
        )
    return groups


def batch_of(groups: list[PromptGroup]) -> Batch:
    return collate(groups, advantages=group_advantages(groups, estimator="grpo"))


def join(rank: int, address: str, ranks: int) -> Group | None:
    """Take the rank's device, and return the ranks' group if there are several."""
    backend = hwrl.get_backend()
    backend.set_device(rank % backend.device_count())
    return Comm().init_default(store=connect_store(address), rank=rank, size=ranks) if ranks > 1 else None


def settings_on(model_directory: Path, **changes: Any) -> EngineSettings:
    settings = EngineSettings(
        model_directory=model_directory,
        learning_rate=1e-2,
        total_steps=10,
        warmup_steps=2,
        min_learning_rate_ratio=0.1,
        micro_batch_tokens=64,
    )
    return replace(settings, **changes)


def engine_on(model_directory: Path, group: Any, **changes: Any) -> FsdpEngine:
    return FsdpEngine(settings_on(model_directory, **changes), backend=hwrl.get_backend(), group=group)


def micro_batch(batch: Batch) -> MicroBatch:
    """Return all of ``batch`` as one pack."""
    return make_pack(batch, torch.arange(batch.rows), device=hwrl.get_backend().device())


def without_padding(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics that do not depend on the division into micro-batches."""
    return {name: value for name, value in metrics.items() if name != "padding_share"}


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole tensor, gathered from all ranks if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def train(
    rank: int, model_directory: Path, address: str, ranks: int, steps: int, recomputes: bool = False
) -> dict[str, Any]:
    """Take ``steps`` steps on this rank's share of each batch; return metrics, weights, log-probabilities."""
    group = join(rank, address, ranks)
    engine = engine_on(model_directory, group, activation_checkpointing=recomputes)
    metrics = []
    for step in range(steps):
        share = groups_of(5, seed=step)[rank::ranks]  # uneven: one rank has more parts than the other
        metrics.append(engine.train_batch(batch_of(share), loss=PolicyLoss("ppo_clip")))
    weights = {name: tensor.cpu().clone() for name, tensor in engine.named_weights()}
    logprobs = engine.logprobs(batch_of(groups_of(3, seed=99)))
    if group is not None:
        group.close()
    return {"metrics": metrics, "weights": weights, "logprobs": logprobs}


def assert_same_training(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Raise unless two runs have the same ``weights``, ``metrics`` and, if present, ``logprobs``, but for rounding."""
    for name, tensor in wanted["weights"].items():
        assert_near(found["weights"][name], tensor, share=1e-3)
    for metrics, expected in zip(found["metrics"], wanted["metrics"], strict=True):
        assert without_padding(metrics) == pytest.approx(without_padding(expected), rel=2e-3, abs=1e-5)
    if "logprobs" in wanted:
        assert_near(found["logprobs"], wanted["logprobs"])
