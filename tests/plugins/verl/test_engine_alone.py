"""The checkpoints of verl's engine on hwrl, beside a stand-in for verl's own engine."""

from __future__ import annotations

import importlib
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hwrl.checkpoint import TRACKER_NAME
from hwrl.errors import CheckpointSaveError
from hwrl.memory import Offloader
from hwrl_verl import tracker

MODULES: dict[str, dict[str, Any]] = {
    "verl.single_controller.base.decorator": {
        "Dispatch": SimpleNamespace(ONE_TO_ALL=None),
        "register": lambda **_: lambda method: method,
    },
    "verl.trainer.ppo.checkpoint_callback": {"CheckpointCallback": object},
    "verl.workers.engine_workers": {"ActorRolloutRefWorker": type("ActorRolloutRefWorker", (), {})},
    "verl.utils.device": {"get_device_name": lambda: "cpu"},
    "verl.workers.engine.base": {"EngineRegistry": SimpleNamespace(register=lambda **_: lambda engine: engine)},
    "verl.workers.engine.fsdp.transformer_impl": {
        name: type(name, (), {}) for name in ("FSDPEngineWithLMHead", "FSDPEngineWithValueHead")
    },
}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of the engines."""
    monkeypatch.delitem(sys.modules, "hwrl_verl.engine", raising=False)
    for path, names in MODULES.items():
        parts = path.split(".")
        for end in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
        module = ModuleType(path)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, path, module)
    found = importlib.import_module("hwrl_verl.engine")
    monkeypatch.setattr(found, "Comm", lambda: SimpleNamespace(default_group=lambda: None))
    yield found
    for name in ("hwrl_verl.engine", "hwrl_verl.callback"):
        sys.modules.pop(name, None)


def engine_of(
    engines: ModuleType, *, rank: int = 0, async_save: bool = False, last: int = 1, offloaded: bool = False
) -> Any:
    engine = engines.HwrlEngineWithLMHead()
    engine.rank, engine.module = rank, torch.nn.Linear(4, 4)
    engine.optimizer = torch.optim.AdamW(engine.module.parameters())
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    engine._offloader = offloader = Offloader(engine.module, engine.optimizer)
    if offloaded:
        offloader.offload()
    contents = ["model", "optimizer", "extra"]
    engine.checkpoint_config = SimpleNamespace(save_contents=contents, load_contents=contents, async_save=async_save)
    engine.optimizer_config = SimpleNamespace(total_training_steps=last)
    return engine


def test_more_ranks_than_saved_resume(engines: ModuleType, tmp_path: Path) -> None:
    """A rank without random numbers of its own in the checkpoint takes another rank's."""
    path, saved = str(tmp_path / "global_step_1" / "actor"), engine_of(engines, rank=0)
    saved.save_checkpoint(path, global_step=1)
    saved._manager.close()
    drawn = torch.rand(3)
    resumed = engine_of(engines, rank=1)
    resumed.load_checkpoint(path)
    assert torch.equal(resumed.module.weight, saved.module.weight)
    assert torch.equal(torch.rand(3), drawn)


def test_an_offloaded_model_is_offloaded_again_if_verl_cannot_gather_its_weights(
    engines: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Any) -> None:
        raise RuntimeError("no room to gather")

    engine = engine_of(engines, offloaded=True)
    monkeypatch.setattr(engines.FSDPEngineWithLMHead, "get_per_tensor_param", refuse, raising=False)
    with pytest.raises(RuntimeError, match="no room to gather") as raised:
        engine.get_per_tensor_param()
    assert engine.module.weight.untyped_storage().nbytes() == 0, f"it is on the device while {raised} is handled"


def until(is_so: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 200.0
    while not is_so() and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_so()


def copied(folder: Path, copy: Path) -> bool:
    """Make a ``copy`` of ``folder`` once; return False, and leave none, if a draft there became a file meanwhile."""
    try:
        if not copy.exists():
            shutil.copytree(folder, copy)
    except shutil.Error:
        shutil.rmtree(copy)
        return False
    return True


class Run:
    """The driver of verl with an actor and a critic; both keep one checkpoint."""

    def __init__(self, engines: ModuleType, folder: Path) -> None:
        self.folder, self._tracker = folder, folder / "latest_checkpointed_iteration.txt"
        self._parts = {part: engine_of(engines, async_save=True, last=3) for part in ("actor", "critic")}
        self._worker = engines.ActorRolloutRefWorker()
        self._worker.actor = SimpleNamespace(engine=self._parts["actor"])

    def tracked(self) -> str:
        return self._tracker.read_text() if self._tracker.exists() else ""

    def save(self, part: str, step: int) -> None:
        """Save, and wait until the part is complete."""
        self._parts[part].save_checkpoint(self._path(part, step), global_step=step, max_ckpt_to_keep=1)
        assert until(lambda: step in self.steps(part))

    def load(self, step: int) -> None:
        for part, engine in self._parts.items():
            engine.load_checkpoint(self._path(part, step))

    def save_data(self, step: int) -> None:
        torch.save({"next": step}, self.folder / f"global_step_{step}" / "data.pt")

    def save_all(self, step: int) -> None:
        self.save("actor", step)
        self.save("critic", step)
        self.save_data(step)
        assert until(lambda: self.tracked() == str(step))

    def begin_step(self) -> None:
        self._worker.async_calls_finalize_fn_exec(blocking=False)

    def end(self) -> None:
        """Do what verl's trainers do after the last step, before they end the workers."""
        self._worker.async_calls_finalize_fn_exec(blocking=True)

    def call_back(self, step: int) -> None:
        """Do what verl's V1 trainers do after each save."""
        from hwrl_verl.callback import FinishLastSave

        trainer = SimpleNamespace(total_training_steps=3, actor_rollout_wg=self._worker)
        FinishLastSave().on_save(trainer=trainer, global_step=step, checkpoint_dir="", async_save=True)

    def steps(self, part: str) -> list[int]:
        return sorted(int(path.name[12:]) for path in (self.folder / "hwrl" / part).glob("global_step_*"))

    def close(self) -> None:
        for engine in self._parts.values():
            engine._manager.close()

    def _path(self, part: str, step: int) -> str:
        return str(self.folder / f"global_step_{step}" / part)


@pytest.mark.parametrize("trainer", ["V1", "other"])
def test_the_tracker_names_a_step_when_actor_critic_and_data_are_complete(
    trainer: str, engines: ModuleType, tmp_path: Path
) -> None:
    run = Run(engines, tmp_path / "run")
    copies: list[Path] = []

    def is_killed_here() -> None:
        """Keep what a kill would leave now; nothing may be lost of the step before."""
        assert run.tracked() == "1" and 1 in run.steps("actor") and 1 in run.steps("critic")
        copies.append(tmp_path / f"killed_{len(copies)}")
        assert until(lambda: copied(run.folder, copies[-1]))

    run.save_all(1)
    run.save("actor", 2)
    is_killed_here()
    run.begin_step()  # waits for nothing
    run.call_back(2)
    run.save("critic", 2)
    (run.folder / "global_step_2" / "data.pt").write_bytes(b"PK half of it")
    time.sleep(0.1)
    is_killed_here()
    run.save_data(2)
    assert until(lambda: run.tracked() == "2" and run.steps("actor") == run.steps("critic") == [2])
    run.save("actor", 3)  # the last step of the training: no save waits for the data that is written after it
    run.save("critic", 3)
    run.save_data(3)
    run.call_back(3) if trainer == "V1" else run.end()
    assert run.tracked() == "3", "verl ends the workers now"
    run.close()
    for copy in copies:
        again = Run(engines, copy)
        again.load(1)
        again.save("actor", 2)
        assert again.tracked() == "1", "the data of the killed run does not count"
        again.save("critic", 2)
        again.save_data(2)
        assert until(lambda again=again: again.tracked() == "2")  # type: ignore[misc]  # mypy cannot infer it
        again.close()
        assert list(copy.glob("hwrl/actor/.unannounced_global_step_2.*")), "nothing is deleted"


@pytest.mark.parametrize("before", [None, 1, 9])
def test_a_part_does_not_go_on_before_the_tracker_names_its_step(before: int | None, tmp_path: Path) -> None:
    """Else it removes the step that the tracker names. Step 9 is of a run that then went back to an earlier step."""
    for part in ("actor", "critic"):
        tracker.begin_part(tmp_path, part, 2)
        (tracker.part_directory(tmp_path, part) / "global_step_2").mkdir(parents=True)
    torch.save({"next": 2}, tmp_path / "global_step_2" / "data.pt")
    if before is not None:
        (tmp_path / TRACKER_NAME).write_text(str(before))
    with pytest.raises(CheckpointSaveError, match=rf"{TRACKER_NAME} did not name it within 0\.1 s"):
        tracker.announce(tmp_path, "critic", 2, timeout_s=0.1)
    tracker.announce(tmp_path, "actor", 2, timeout_s=200.0)
    tracker.announce(tmp_path, "critic", 2, timeout_s=200.0)
    assert tracker.announced(tmp_path) == 2
