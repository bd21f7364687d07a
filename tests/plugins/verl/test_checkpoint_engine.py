"""verl's own manager, FSDP2 actors and rollout workers, with hwrl's checkpoint engine: real processes on Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins.verl import actors
from tests.support.tiny_model import tiny_model

pytestmark = pytest.mark.filterwarnings("default")  # verl's own


class Run:
    def __init__(self, model: Path) -> None:
        sync = actors.sync_config(timeout_s=15.0)
        self.actors = actors.actors(model, 2, sync=sync, env={"VERL_ENGINE_DEVICE": "cuda"}, name="actor")
        self.rollouts, self.replicas = actors.rollouts(model, 3, sync=sync)
        self.manager = actors.CheckpointEngineManager(sync, self.actors, self.replicas)

    def check(self, step: int, workers: list[int]) -> None:
        expected = self.actors.whole_weights()[0]
        for index, (kept, steps) in enumerate(self.rollouts.kept()):
            if index in workers:
                assert steps[-1] == step
                assert list(kept) == list(expected)
                assert all(torch.equal(kept[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(model)
    with actors.cluster():
        yield Run(model)


def test_each_sync_brings_the_exact_weights_and_the_step(run: Run) -> None:
    for step in (7, 8, 9):
        losses = run.actors.train(step)
        begin = time.monotonic()
        metrics = run.manager.update_weights(global_steps=step)
        print(losses, metrics, time.monotonic() - begin)
        run.check(step, [0, 1, 2])
