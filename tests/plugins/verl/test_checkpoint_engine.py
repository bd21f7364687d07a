"""verl's own manager, FSDP2 actors and rollout workers, with hwrl's checkpoint engine: real processes on Ray."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.errors import TransferFailedError
from tests.plugins.verl import actors
from tests.support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: make test-stack-verl"),
    pytest.mark.filterwarnings("default"),  # verl's own
]

TIMEOUT_S = 150.0
OPTIONS: dict[str, Any] = {"timeout_s": TIMEOUT_S, "bucket_nbytes": 4096, "buckets": 2}  # a version is many buckets


class Run:
    """Two actors with verl's own FSDP2 engine, three rollout workers, verl's manager."""

    def __init__(self, model: Path) -> None:
        sync = actors.sync_config(**OPTIONS)
        self.actors = actors.actors(model, 2, sync=sync, vendor="nvidia")
        self.rollouts, self.replicas = actors.rollouts(model, 3, sync=sync)
        self.manager = actors.CheckpointEngineManager(sync, self.actors, self.replicas)
        self.step = 0

    def update(self) -> float:
        """Train a step, and update the weights; return the seconds of the update."""
        self.step += 1
        self.actors.train(self.step)
        begin = time.monotonic()
        self.manager.update_weights(global_steps=self.step)
        return time.monotonic() - begin

    def check(self, *workers: int) -> None:
        """Check that exactly ``workers`` have the actors' weights, bit for bit, and their step."""
        expected = self.actors.whole_weights()[0]
        kept = actors.ray.get([self.rollouts.workers[index].kept.remote() for index in workers])
        for weights, steps in kept:
            assert steps[-1] == self.step
            assert set(weights) == set(expected)  # they come in the order of the buckets
            assert all(torch.equal(weights[name], expected[name]) for name in expected)

    def fail(self, worker: int, fault: str) -> None:
        actors.ray.get(self.rollouts.workers[worker].fail.remote(fault))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    model = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(model)
    with actors.cluster():
        yield Run(model)


def test_verls_training_worker_learns_on_the_platform(run: Run) -> None:
    losses = [run.actors.train(0)[0] for _ in range(4)]
    assert losses[-1] < losses[0]
    assert run.actors.look("type(worker.engine).__module__")[0].startswith("verl.")


def test_each_update_brings_the_exact_weights_and_the_step(run: Run) -> None:
    seconds = [run.update() for _ in range(3)]
    run.check(0, 1, 2)
    print("seconds of updates:", seconds)


@pytest.mark.parametrize("options", [{"whole": True}, {"transport": "ipc"}, {"transport": "host"}], ids=str)
def test_each_option_brings_the_exact_weights(run: Run, options: dict[str, Any]) -> None:
    before = run.manager
    sync = actors.sync_config(**OPTIONS, **options)
    for group in (run.actors, run.rollouts):
        group.use_engine(sync)
    run.manager = actors.CheckpointEngineManager(sync, run.actors, run.replicas)
    for _ in range(2):
        run.update()
        run.check(0, 1, 2)
    run.fail(1, "at once")
    with pytest.raises(RuntimeError, match="this worker fails at once"):
        run.update()
    run.update()
    run.check(0, 1, 2)
    run.manager = before
    for group in (run.actors, run.rollouts):
        group.use_engine(before.config)


@pytest.mark.parametrize("fault", ["at once", "after a tensor"])
def test_a_failing_worker_does_not_wedge_the_next_update(run: Run, fault: str) -> None:
    run.fail(1, fault)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=f"this worker fails {fault}"):
        run.update()
    run.update()
    run.check(0, 1, 2)
    assert time.monotonic() - begin < TIMEOUT_S
    assert all(replica.serving for replica in run.replicas)


def test_actors_that_fail_to_make_tensors_end_the_update_at_once(run: Run) -> None:
    run.actors.fail("no such tensor")
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="no such tensor"):
        run.update()
    run.update()
    run.check(0, 1, 2)
    assert time.monotonic() - begin < TIMEOUT_S


def test_a_removed_worker_is_not_waited_for_and_can_come_back(run: Run) -> None:
    removed = run.replicas[2]
    run.manager.remove_replicas([removed])
    assert run.update() < TIMEOUT_S
    run.check(0, 1)
    run.manager.add_replicas([removed])
    run.update()
    run.check(0, 1, 2)


def test_a_worker_that_dies_in_an_update_is_removed_and_the_others_go_on(run: Run) -> None:
    run.fail(2, "dies")
    begin = time.monotonic()
    with pytest.raises((actors.ray.exceptions.RayActorError, TransferFailedError)):
        run.update()
    assert time.monotonic() - begin < TIMEOUT_S
    run.manager.remove_replicas([run.replicas[2]])
    assert run.update() < TIMEOUT_S
    run.check(0, 1)
