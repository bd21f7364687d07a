"""The trainer on the real FSDP2 engine: versions, publishing, the age limit, and that it learns what is rewarded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import hwrl
from hwrl.errors import EngineError
from hwrl.rollout.groups import PromptGroup, Response
from hwrl.run.demo import write_demo
from hwrl.train.choices import LossName
from hwrl.train.fsdp import FsdpEngine
from hwrl.train.losses import PolicyLoss
from hwrl.train.trainer import Algorithm, AsyncTrainer

GOOD, BAD = 5, 9


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=3, prompts=16)
    return directory / "model"


class Outlet:
    """Keeps what was published."""

    def __init__(self) -> None:
        self.versions: list[int] = []

    def __call__(self, version: int, weights: Iterator[tuple[str, torch.Tensor]]) -> Mapping[str, float]:
        self.versions.append(version)
        return {"sync/nbytes": float(sum(tensor.nbytes for _, tensor in weights))}


def trainer_of(model_directory: Path, outlet: Outlet, **settings: Any) -> AsyncTrainer:
    engine = FsdpEngine(
        model_directory, backend=hwrl.get_backend(), group=None, learning_rate=3e-3, total_steps=100, **settings
    )
    return AsyncTrainer(
        engine,
        algorithm=Algorithm(PolicyLoss()),
        publish=outlet,
        max_staleness=1,
        trigger_parameter_sync_step=2,
    )


def group_of(*, version: int, logprob: float = -2.77) -> PromptGroup:
    """One prompt, answered once with GOOD and once with BAD."""
    responses = [
        Response(
            np.array([token], dtype=np.int32),
            np.array([logprob], dtype=np.float32),
            np.array([version], dtype=np.int32),
            truncated=False,
        )
        for token in (GOOD, BAD)
    ]
    return PromptGroup.join(
        responses,
        sequence_number=0,
        lease_id=0,
        prompt_ids=np.array([2, 3, 13], dtype=np.int32),
        rewards=[1.0, 0.0],
        metrics={"reward": 0.5, "exact": 0.25},
    )


def test_versions_are_published_every_so_many_steps(model_directory: Path) -> None:
    outlet = Outlet()
    trainer = trainer_of(model_directory, outlet)
    trainer.publish()
    figures = [trainer.step([group_of(version=trainer.version)]) for _ in range(5)]
    assert outlet.versions == [0, 1, 2]
    assert [row["weights/version"] for row in figures] == [0, 1, 1, 2, 2]
    assert figures[1]["sync/nbytes"] == 4 * 100_800
    assert figures[0]["reward/exact"] == 0.25


def test_a_group_beyond_the_age_limit_is_never_trained_on(model_directory: Path) -> None:
    trainer = trainer_of(model_directory, Outlet())
    trainer.load_state_dict({"steps_done": 8})
    before = {name: tensor.clone() for name, tensor in trainer.engine.named_weights()}
    trainer_figures = trainer.step([group_of(version=3)])
    assert trainer_figures["staleness/max"] == 1
    with pytest.raises(EngineError, match=r"age 2 reached(.|\n)*version 4(.|\n)*staleness_threshold is 1"):
        trainer.step([group_of(version=2)])
    assert trainer.steps_done == 9
    assert any(not torch.equal(before[name], tensor) for name, tensor in trainer.engine.named_weights())


def test_the_seconds_of_a_step_add_up_to_all_the_time_since_the_last(model_directory: Path) -> None:
    trainer = trainer_of(model_directory, Outlet())
    trainer.step([group_of(version=0)])
    figures = trainer.step([group_of(version=0)])
    assert figures["timing_s/train"] > figures["timing_s/wait"] >= 0
    assert figures["timing_s/sync"] > 0


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", ["ppo_clip", "tis", "decoupled"])
def test_every_loss_teaches_what_was_rewarded(model_directory: Path, name: LossName, offload: bool) -> None:
    engine = FsdpEngine(
        model_directory,
        backend=hwrl.get_backend(),
        group=None,
        learning_rate=3e-3,
        total_steps=100,
        param_offload=offload,
        optimizer_offload=offload,
    )
    trainer = AsyncTrainer(
        engine,
        algorithm=Algorithm(PolicyLoss(name), ppo_epochs=2, mini_batches=2),
        publish=Outlet(),
        max_staleness=0,
    )
    for _ in range(6):
        trainer.step([group_of(version=trainer.version), group_of(version=trainer.version)])
    with engine.on_device(optimizer=False), torch.no_grad():
        chances = engine.model(torch.tensor([[2, 3, 13]])).logits[0, -1].softmax(-1)
    assert chances[GOOD] > 1.2 / 16
    assert chances[BAD] < 0.95 / 16
