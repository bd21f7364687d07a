"""transformers' Trainer with hwrl's checkpoints and offload: killed with SIGKILL, it resumes as if nothing happened."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.errors import CheckpointError, ConfigError
from hwrl_trl import CheckpointCallback, OffloadCallback
from tests.plugins.trl.tiny_trainer import make_trainer
from tests.support.trainer_checkpoints import assert_equal, trained


def make_offloading(directory: Path) -> Any:
    trainer = make_trainer(directory)
    trainer.add_callback(OffloadCallback())
    return trainer


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(make_trainer, tmp_path_factory.mktemp("undisturbed"))[1]


def test_it_learns_and_is_saved_where_transformers_saves(undisturbed: Any) -> None:
    losses = [entry["loss"] for entry in undisturbed["log"]]
    assert undisturbed["step"] == len(losses) == 8 and losses[-1] < losses[0]


@pytest.mark.parametrize(("make", "async_save"), [(make_trainer, False), (make_offloading, True)])
def test_killed_within_and_between_epochs_it_resumes_equal(
    undisturbed: Any, tmp_path: Path, make: Any, async_save: bool
) -> None:
    began, content = trained(make, tmp_path, kill_at=(3, 5), max_ckpt_to_keep=2, async_save=async_save)
    assert began == 5 or (async_save and began == 4)
    assert_equal(content, undisturbed)


def test_two_ranks_resume_equal(tmp_path: Path) -> None:
    """An epoch has three steps here."""
    _, undisturbed = trained(make_trainer, tmp_path / "undisturbed", ranks=2)
    began, content = trained(make_trainer, tmp_path / "killed", kill_at=(4,), ranks=2, async_save=True)
    assert began in (3, 4)
    assert_equal(content, undisturbed)


def test_the_files_for_transformers_are_a_model(undisturbed: Any, tmp_path: Path) -> None:
    """``hf`` has the parameters of the checkpoint, under the names of ``from_pretrained``."""
    parameters = {name.removeprefix("model."): one for name, one in undisturbed["tensors"].items() if "model." in name}
    for name, tensor in undisturbed["hf"].items():
        assert tensor.equal(parameters[name])


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("file", ["hf/model.safetensors", "__0_0.distcp"])
def test_a_damaged_checkpoint_is_skipped(tmp_path: Path, file: str) -> None:
    trainer = make_trainer(tmp_path, max_steps=2)
    with CheckpointCallback(trainer, tmp_path / "checkpoints") as checkpoints:
        assert checkpoints.resume_path() is None
        trainer.train()
        damage(tmp_path / "checkpoints" / "global_step_2" / file)
        assert checkpoints.resume_path() == str(tmp_path / "checkpoints" / "global_step_1" / "hf")
    trainer = make_trainer(tmp_path, max_steps=3)
    with CheckpointCallback(trainer, tmp_path / "checkpoints") as checkpoints:
        trainer.train(resume_from_checkpoint=checkpoints.resume_path())
        assert sorted(path.name for path in (tmp_path / "checkpoints").glob("global*")) == [
            f"global_step_{step}" for step in (1, 2, 3)
        ]
        assert checkpoints.resume_path() == str(tmp_path / "checkpoints" / "global_step_3" / "hf")


def test_training_never_begins_anew_over_checkpoints(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=1)
    with CheckpointCallback(trainer, tmp_path / "checkpoints") as checkpoints:
        trainer.train()
        with pytest.raises(CheckpointError, match="resume_path"):
            trainer.train()
        assert checkpoints.resume_path() is not None


@pytest.mark.parametrize("settings", [{"save_strategy": "best"}, {"load_best_model_at_end": True}])
def test_what_transformers_must_save_itself_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    trainer = make_trainer(tmp_path, **settings)
    with pytest.raises(ConfigError, match=next(iter(settings))):
        CheckpointCallback(trainer, tmp_path / "checkpoints")


def test_transformers_own_saves_go_on_with_an_offloaded_optimizer(tmp_path: Path) -> None:
    trainer = make_offloading(tmp_path)
    trainer.args.max_steps = 2
    trainer.train()
    state = torch.load(tmp_path / "checkpoint-1" / "optimizer.pt", weights_only=True)
    assert state["state"][0]["exp_avg"].abs().sum() > 0


@pytest.mark.parametrize("strategy", ["epoch", "best"])
def test_transformers_also_saves_an_offloaded_optimizer_between_steps(tmp_path: Path, strategy: str) -> None:
    evaluating = {"eval_strategy": "epoch", "metric_for_best_model": "loss"} if strategy == "best" else {}
    trainer = make_trainer(tmp_path, save_strategy=strategy, max_steps=6, **evaluating)
    trainer.add_callback(OffloadCallback())
    trainer.train()
    state = torch.load(tmp_path / "checkpoint-5" / "optimizer.pt", weights_only=True)
    assert state["state"][0]["exp_avg"].abs().sum() > 0
    trainer.evaluate()  # no offloader is open now


def test_the_optimizer_is_on_the_host_between_steps_and_in_saves(tmp_path: Path) -> None:
    from transformers import TrainerCallback

    offloaded: list[bool] = []

    class Watch(TrainerCallback):  # type: ignore[misc] # transformers is not followed by the type checker
        def on_step_end(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
            assert offloading.offloader is not None
            moments = next(iter(parts["optimizer"].optimizer.state.values()), None)
            if moments is None:  # before the first step of all
                return
            copy = offloading.offloader.lend(moments["exp_avg"])
            offloaded.append(copy is not None)
            if copy is not None:
                copy.give_back()

        on_step_begin = on_step_end

    for steps in (2, 3):
        offloading = OffloadCallback()
        trainer = make_trainer(tmp_path, max_steps=steps)
        trainer.add_callback(offloading)
        with CheckpointCallback(trainer, tmp_path / "checkpoints") as checkpoints:
            trainer.add_callback(Watch())
            trainer.train(resume_from_checkpoint=checkpoints.resume_path())
    assert offloaded == [True] * 5


def test_the_example_of_the_page_runs_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[3] / "docs" / "trl.md").read_text()
    block = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0]
    exec(compile(block, "trl.md", "exec"), {})
    more: dict[str, Any] = {}
    exec(compile(block.replace("max_steps=4", "max_steps=6"), "trl.md", "exec"), more)
    assert more["trainer"].state.global_step == 6
    assert (tmp_path / "out/checkpoints/latest_checkpointed_iteration.txt").read_text() == "6"


def make_adapted(directory: Path) -> Any:
    """Only an adapter is trained."""
    from peft import LoraConfig, get_peft_model

    trainer = make_trainer(directory)
    model = get_peft_model(trainer.model, LoraConfig(r=4, lora_dropout=0.2, target_modules=["q_proj", "v_proj"]))
    return type(trainer)(model, args=trainer.args, train_dataset=trainer.train_dataset)


def test_an_adapter_resumes_equal_and_the_frozen_model_is_not_saved(tmp_path: Path) -> None:
    _, undisturbed = trained(make_adapted, tmp_path / "undisturbed")
    _, content = trained(make_adapted, tmp_path / "killed", kill_at=(3,))
    assert_equal(content, undisturbed)
    assert all("lora_" in name for name in content["tensors"])
    assert all("lora_" in name for name in content["hf"])
