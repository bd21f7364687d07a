"""A trainer rank starts only with a model that fits, and resumes only with the model and the data of its run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hwrl.comm import serve_store, store_address
from hwrl.errors import DeviceMemoryError, HwrlError
from hwrl.run.cluster.placement import ProcessDevices
from hwrl.run.config import Config, load_config
from hwrl.run.demo import write_demo
from hwrl.run.identity import identify_inputs
from hwrl.run.remote import ProcessSetup
from hwrl.run.trainer import TrainerRank
from tests.support.fsdp_training import groups_of


@pytest.fixture
def address() -> Iterator[str]:
    store = serve_store()
    yield store_address(store)


def config_of(directory: Path) -> Config:
    words = ["train.batch_groups=4", f"dir={directory / 'run'}", f"model.path={directory / 'model'}"]
    words += [f"data.train={directory / 'train.jsonl'}", f"data.eval={directory / 'eval.jsonl'}"]
    return load_config(directory / "config.yaml", words)


@pytest.fixture
def moved(tmp_path: Path, address: str) -> Config:
    """The configuration of a run that saved one step and was then moved, with all its files."""
    write_demo(tmp_path / "here", seed=1, prompts=16)
    rank = rank_of(config_of(tmp_path / "here"), address)
    rank.send_weights()
    rank.step(groups_of(4, seed=1))
    assert rank.save({"owed": []})["checkpoint/blocked_s"] > 0
    rank.close()
    return config_of((tmp_path / "here").rename(tmp_path / "there"))


def rank_of(config: Config, address: str) -> TrainerRank:
    setup = ProcessSetup(config, identify_inputs(config), "cpu", ProcessDevices(), address)
    return TrainerRank(setup, rank=0, incarnation=0, transport="host")


def set_in(config: Config, **settings: object) -> None:
    """Change the model's configuration."""
    path = config.model.path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_a_model_too_large_for_the_machine_is_refused_before_it_is_built(tmp_path: Path, address: str) -> None:
    write_demo(tmp_path, seed=1, prompts=16)
    config = config_of(tmp_path)
    large = {"hidden_size": 1 << 13, "intermediate_size": 1 << 16, "num_hidden_layers": 100}
    set_in(config, **large, layer_types=["full_attention"] * 100)
    with pytest.raises(DeviceMemoryError, match=r"the run does not fit(.|\n)*hwrl plan CONFIG"):
        rank_of(config, address)


def test_a_moved_run_goes_on(moved: Config, address: str) -> None:
    set_in(moved, _name_or_path="/there/model", transformers_version="0")
    rank = rank_of(moved, address)
    restored = rank.restore()
    assert restored is not None and restored.step == 1
    rank.close()


def replace_the_model(config: Config) -> None:
    write_demo(config.model.path.parent, seed=1, prompts=16, hidden=96)


def change_the_data(config: Config) -> None:
    with config.data.train_sets[0].path.open("a") as file:
        file.write('{"prompt": "1>", "answer": "1"}\n')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (replace_the_model, "build the same model"),
        (change_the_data, "does not hold the checkpoint's training data"),
    ],
)
def test_another_model_or_other_data_are_refused(
    moved: Config, address: str, change: Callable[[Config], None], message: str
) -> None:
    change(moved)
    rank = rank_of(moved, address)
    with pytest.raises(HwrlError, match=message):
        rank.restore()
    rank.close()
