"""The newest checkpoint's ledger decides which batches and versions a resumed run may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.errors import ConfigError
from hwrl.run.config import Config, dump_run_config
from hwrl.run.run_directory import claimed_directory
from hwrl_cpu import INFO, CpuBackend
from tests.support.run_config import config_of


def resumed(directory: Path, *, batch: int, trigger: int) -> Config:
    counts: dict[str, Any] = {"train": {"batch_groups": batch}}
    counts |= {"async_training": {"trigger_parameter_sync_step": trigger}}
    return config_of(directory, resume=True, **counts)


def save_checkpoint(directory: Path, step: int, ledger: object) -> None:
    with CheckpointManager(directory / "checkpoints", backend=CpuBackend(INFO)) as manager:
        manager.save(step, {"model": {"weight": torch.ones(3)}}, extra={"ledger": ledger})


@pytest.mark.parametrize("is_edited", [False, True], ids=["config.yaml is deleted", "config.yaml is edited"])
@pytest.mark.parametrize(
    ("batch", "trigger", "told"),
    [
        (4, 4, "train.batch_groups(.|\n)*was 8"),
        (16, 1, "train.batch_groups(.|\n)*was 8"),  # as many prompts for each version
        (8, 4, "async_training.trigger_parameter_sync_step(.|\n)*was 2"),
    ],
)
def test_other_batches_and_versions_than_the_checkpoints_are_refused(
    tmp_path: Path, is_edited: bool, batch: int, trigger: int, told: str
) -> None:
    ledger = {"version": 4, "trained": 80, "next": 90, "owed": [], "groups_per_version": 16}
    save_checkpoint(tmp_path, 10, ledger)
    wrong, right = resumed(tmp_path, batch=batch, trigger=trigger), resumed(tmp_path, batch=8, trigger=2)
    if is_edited:
        (tmp_path / "config.yaml").write_bytes(dump_run_config(wrong))
    before = [path.read_bytes() for path in tmp_path.glob("config.yaml")]
    with pytest.raises(ConfigError, match=f"with a different {told}"), claimed_directory(wrong):
        pass
    assert [path.read_bytes() for path in tmp_path.glob("config.yaml")] == before
    (tmp_path / "config.yaml").unlink(missing_ok=True)
    with claimed_directory(right):
        pass


@pytest.mark.parametrize(
    "ledger",
    [
        "of another program",
        {"version": 4, "trained": 80, "next": 90, "owed": []},
        {"groups_per_version": 16},
        {"version": 4, "trained": 60, "next": 90, "owed": [], "groups_per_version": 16},  # of several sizes of batches
    ],
    ids=["no ledger", "of an earlier hwrl", "before the first batch", "of batches of several sizes"],
)
def test_a_checkpoint_that_does_not_tell_its_batches_may_be_resumed(tmp_path: Path, ledger: object) -> None:
    save_checkpoint(tmp_path, 10, ledger)
    with claimed_directory(resumed(tmp_path, batch=4, trigger=2)):
        pass
