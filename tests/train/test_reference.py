"""The reference: the starting model, or an adapter's base; the policy's steps never change it."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import hwrl
from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError
from hwrl.interfaces import LoraSettings
from hwrl.testing.processes import run_processes
from hwrl.train import FsdpEngine, PolicyLoss, ReferenceModel
from tests.support.fsdp_training import batch_of, engine_on, groups_of, join, settings_on
from tests.support.near import assert_near

LORA = LoraSettings(rank=4, alpha=8.0)


def with_reference(model_directory: Path, group: Any, **changes: Any) -> FsdpEngine:
    settings, backend = settings_on(model_directory, **changes), hwrl.get_backend()
    reference = ReferenceModel(settings, backend=backend, group=group)
    return FsdpEngine(settings, backend=backend, group=group, reference=reference)


def compare(
    rank: int, model_directory: Path, address: str, ranks: int, changes: dict[str, Any]
) -> dict[str, torch.Tensor]:
    """Return log-probabilities of the reference before and after two steps, and the policy's own at the start."""
    group = join(rank, address, ranks)
    build = engine_on if "lora" in changes else with_reference
    engine = build(model_directory, group, **changes)
    batch = batch_of(groups_of(5, seed=0)[rank::ranks])
    with engine.on_device(optimizer=True):
        found = {"own": engine.logprobs(batch), "before": engine.reference_logprobs(batch)}
        for _ in range(2):
            engine.train_batch(batch, loss=PolicyLoss())
        found |= {"moved": engine.logprobs(batch), "after": engine.reference_logprobs(batch)}
        again = engine.train_batch(batch, loss=PolicyLoss())  # the adapter is back
    assert again["grad_norm"] > 0
    engine.close()
    if group is not None:
        group.close()
    return found


@pytest.mark.parametrize(
    "changes",
    [{}, {"dtype": torch.bfloat16, "param_offload": True}, {"host_step": True}, {"lora": LORA}],
    ids=["float32", "bfloat16", "host", "adapter"],
)
def test_the_reference_stays_the_starting_model(model_directory: Path, changes: dict[str, Any]) -> None:
    (found,) = run_processes(compare, 1, model_directory, "", 1, changes)
    assert torch.equal(found["before"], found["own"])
    assert torch.equal(found["after"], found["before"])
    assert (found["moved"] - found["own"]).abs().max() > 1e-3


@pytest.mark.parametrize("changes", [{}, {"lora": LORA}], ids=["copy", "adapter"])
def test_two_ranks_have_the_reference_of_one(model_directory: Path, changes: dict[str, Any]) -> None:
    alone = engine_on(model_directory, None)
    store = serve_store()
    pair = run_processes(compare, 2, model_directory, store_address(store), 2, changes)
    for rank, found in enumerate(pair):
        wanted = alone.logprobs(batch_of(groups_of(5, seed=0)[rank::2]))
        assert_near(found["before"], wanted)
        assert torch.equal(found["after"], found["before"])


def test_an_adapters_reference_is_its_base(model_directory: Path) -> None:
    adapted, base = engine_on(model_directory, None, lora=LORA), engine_on(model_directory, None)
    batch = batch_of(groups_of(5, seed=0))
    for _ in range(2):
        adapted.train_batch(batch, loss=PolicyLoss())
    assert torch.equal(adapted.reference_logprobs(batch), base.logprobs(batch))


class Elsewhere(ReferenceModel):
    """A reference that counts the device as another place than the host, as on an accelerator."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._offloader.offload(params=True, optimizer=False)


def test_an_offloaded_reference_is_on_the_device_only_between_uses(model_directory: Path) -> None:
    settings, backend = settings_on(model_directory), hwrl.get_backend()
    reference = Elsewhere(settings, backend=backend, group=None)
    engine = FsdpEngine(settings, backend=backend, group=None, reference=reference)
    batch = batch_of(groups_of(3, seed=0))

    def nbytes() -> int:
        return sum(one.untyped_storage().nbytes() for one in reference.model.parameters())

    assert nbytes() == 0
    assert torch.equal(engine.reference_logprobs(batch), engine.logprobs(batch))
    assert nbytes() == 0


def test_an_engine_without_a_reference_says_so(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="FsdpEngine has no reference model"):
        engine_on(model_directory, None).reference_logprobs(batch_of(groups_of(1, seed=0)))


def test_a_distilled_policy_nears_its_teacher_without_any_advantage(model_directory: Path, tmp_path: Path) -> None:
    teacher = engine_on(model_directory, None)
    batch = batch_of(groups_of(5, seed=0))
    for _ in range(3):
        teacher.train_batch(batch, loss=PolicyLoss())
    shutil.copytree(model_directory, tmp_path / "teacher")
    teacher.export(tmp_path / "teacher")
    reference = ReferenceModel(settings_on(tmp_path / "teacher"), backend=hwrl.get_backend(), group=None)
    student = FsdpEngine(settings_on(model_directory), backend=hwrl.get_backend(), group=None, reference=reference)
    of_teacher = student.reference_logprobs(batch)
    taught = replace(batch, reference_logprobs=of_teacher, advantages=batch.advantages * 0)
    assert_near(of_teacher, teacher.logprobs(batch))

    def gap() -> float:
        return float((student.logprobs(batch) - of_teacher).abs().sum())

    before = gap()
    for _ in range(8):
        student.train_batch(taught, loss=PolicyLoss("distill", is_threshold=1e9))
    assert gap() < before / 2
