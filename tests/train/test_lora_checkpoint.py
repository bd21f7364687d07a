"""A trainer of an adapter, saved, restored and exported; and refused on another base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hwrl import cli
from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.run.cluster.placement import ProcessDevices
from hwrl.run.config import Config, load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.run.remote import ProcessSetup
from hwrl.run.trainer import TrainerRank
from tests.support.fsdp_training import groups_of

WEIGHTS = "adapter_model.safetensors"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    path = write_demo(tmp_path, seed=1, prompts=16)
    return load_config(path, ["model.lora_rank=4", "optimizer.learning_rate=1e-2", "train.batch_groups=4"])


@pytest.fixture
def address() -> Iterator[str]:
    store = serve_store()
    yield store_address(store)


def rank_of(config: Config, address: str) -> TrainerRank:
    setup = ProcessSetup(config, identify_inputs(config), "cpu", ProcessDevices(), address)
    return TrainerRank(setup, rank=0, incarnation=0, transport="host")


def trained(config: Config, address: str, *, steps: int) -> list[dict[str, float]]:
    """Take and save ``steps`` steps, export, and return the steps' metrics."""
    rank = rank_of(config, address)
    rank.send_weights()
    metrics = [rank.step(groups_of(4, seed=number)).metrics for number in range(steps)]
    rank.save({"owed": []})
    rank.export_model()
    rank.close()
    return metrics


def spoil(model: Path) -> None:
    """Change one number of the model's weights."""
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_the_first_line_tells_of_everything_that_was_sent(config: Config, address: str) -> None:
    first, second = trained(config, address, steps=2)
    adapter_nbytes = sum(tensor.nbytes for tensor in load_file(config.dir / "model" / WEIGHTS).values())
    base_nbytes = sum(tensor.nbytes for tensor in load_file(config.model.path / "model.safetensors").values())
    sent = ("sync/base_sent", "sync/base_nbytes", "sync/adapter_nbytes")
    assert [first[name] for name in sent] == [1, base_nbytes, 2 * adapter_nbytes]
    assert [second[name] for name in sent] == [0, 0, adapter_nbytes]


def test_a_restored_trainer_has_the_adapter_that_was_saved_and_exported(
    config: Config, address: str, tmp_path: Path
) -> None:
    trained(config, address, steps=2)
    export = ["checkpoints", "export", str(config.dir / "checkpoints"), str(tmp_path / "again")]
    assert cli.main([*export, "--model", str(config.model.path)]) == 0
    exported = load_file(config.dir / "model" / WEIGHTS)
    assert any(tensor.any() for name, tensor in exported.items() if "lora_B" in name), "it was trained"
    torch.testing.assert_close(load_file(tmp_path / "again" / WEIGHTS), exported, rtol=0, atol=0)
    rank = rank_of(config.model_copy(update={"seed": 7}), address)
    restored = rank.restore()
    assert restored is not None and restored.step == 2
    rank.export_model()
    rank.close()
    torch.testing.assert_close(load_file(config.dir / "model" / WEIGHTS), exported, rtol=0, atol=0)


def test_a_model_that_cannot_be_written_is_an_error_of_the_run_directory(config: Config, address: str) -> None:
    (config.dir / "model").parent.mkdir()
    (config.dir / "model").touch()
    rank = rank_of(config, address)
    with pytest.raises(RunDirectoryError, match="the trained model cannot be written to"):
        rank.export_model()
    rank.close()


def test_an_adapter_goes_on_with_no_other_base(
    config: Config, address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(config, address, steps=1)
    spoil(config.model.path)
    rank = rank_of(config, address)
    with pytest.raises(ConfigError, match="adapter does not belong to the model in"):
        rank.restore()
    rank.close()
    export = ["checkpoints", "export", str(config.dir / "checkpoints"), str(tmp_path / "wrong")]
    assert cli.main([*export, "--model", str(config.model.path)]) == 1
    assert "the adapter was trained on other weights" in capsys.readouterr().err
    assert not (tmp_path / "wrong").exists()
