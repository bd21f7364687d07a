"""verl's FSDP2 engine on hwrl's Offloader and CheckpointManager, in verl's own TrainingWorker on Ray."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plugins.verl import actors
from tests.support.optimizers import assert_same
from tests.support.tiny_model import tiny_model

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="needs verl: make test-stack-verl"),
    pytest.mark.filterwarnings("default"),  # verl's own
]

ON_DEVICE = "sum(p.to_local().untyped_storage().nbytes() for p in worker.engine.module.parameters())"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    model = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(model)
    with actors.cluster():
        yield model


def test_an_async_save_resumes_in_new_workers_with_the_same_weights_and_the_same_next_loss(
    model: Path, tmp_path: Path
) -> None:
    sync = actors.sync_config()
    first = actors.actors(model, 2, sync=sync, offload=True, async_save=True, name="first")
    assert first.look("type(worker.engine).__module__") == ["hwrl_verl.engine"] * 2
    assert first.look(ON_DEVICE) == [0, 0], "the parameters are on the host between steps"
    for step in (1, 2, 3):
        first.train(step)
        first.save(str(tmp_path / f"global_step_{step}" / "actor"), step, 2)
        torch.save({}, tmp_path / f"global_step_{step}" / "data.pt")  # as verl's driver does
    next_loss = first.train(4)
    weights = first.whole_weights()[0]
    assert first.look(ON_DEVICE) == [0, 0]
    first.look("worker.engine._manager.wait()")
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert sorted(path.name for path in (tmp_path / "hwrl/actor").glob("global_step_*")) == [
        "global_step_2",
        "global_step_3",
    ]
    for worker in first.workers:
        actors.ray.kill(worker)

    second = actors.actors(model, 2, sync=sync, offload=False, name="second")
    second.load(str(tmp_path / "global_step_3" / "actor"))
    assert second.train(4) == next_loss
    again = second.whole_weights()[0]
    assert list(again) == list(weights)
    assert all(torch.equal(again[name], weights[name]) for name in weights)


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "AdamW-fused": {"override_optimizer_config": {"fused": True}},
    "SGD": {"optimizer": "SGD"},
    "SGD-momentum": {"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}},
}  # verl gives all parameters to one optimizer, and torch's Muon takes matrices only


@pytest.mark.timeout(1800)  # three times two workers on Ray
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        pytest.param(kind, part, marks=[] if (kind, part) == ("AdamW", "both") else pytest.mark.extended)
        for kind in OPTIMIZERS
        for part in ("checkpoint", "offload", "both")
    ],
)
def test_training_is_that_of_verls_own_engine_bit_for_bit(kind: str, part: str, model: Path, tmp_path: Path) -> None:
    sync, path = actors.sync_config(), str(tmp_path / "global_step_2" / "actor")

    def end_of(name: str, *, begin: int = 0, **options: Any) -> Any:
        group = actors.actors(model, 2, sync=sync, name=name, **options, **OPTIMIZERS[kind])
        group.look(f"torch.manual_seed({begin}) and None")  # torch seeds each process by chance
        if begin:
            group.load(path)
        for step in range(begin + 1, 5):
            group.train(step)
            if step == 2 and part != "offload" and name == "fresh":
                group.save(path, step)
        found = group.state()
        for worker in group.workers:
            actors.ray.kill(worker)
        return found

    expected = end_of("plain", vendor="nvidia")
    assert_same(end_of("fresh", offload=part != "checkpoint"), expected)
    if part != "offload":
        assert_same(end_of("resumed", begin=2, offload=part != "checkpoint"), expected)
