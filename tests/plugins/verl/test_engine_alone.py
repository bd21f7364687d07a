"""The checkpoints of verl's engine on hwrl, beside a stand-in for verl's own engine."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl.memory import Offloader

MODULES: dict[str, dict[str, Any]] = {
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
    yield importlib.import_module("hwrl_verl.engine")
    sys.modules.pop("hwrl_verl.engine", None)


def engine_of(engines: ModuleType, *, rank: int) -> Any:
    class Alone(engines.HwrlEngineWithLMHead):  # type: ignore[misc, name-defined] # it is loaded at run time
        def _open_manager(self, local_path: str, *, keep: int | None = None) -> CheckpointManager:
            return CheckpointManager(Path(local_path).parents[1] / "hwrl" / Path(local_path).name)

    engine = Alone()
    engine.rank, engine.module = rank, torch.nn.Linear(4, 4)
    engine.optimizer = torch.optim.AdamW(engine.module.parameters())
    engine.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(engine.optimizer)
    engine._offloader = Offloader(engine.module, engine.optimizer)
    contents = ["model", "optimizer", "extra"]
    engine.checkpoint_config = SimpleNamespace(save_contents=contents, load_contents=contents, async_save=False)
    engine.optimizer_config = SimpleNamespace(total_training_steps=1)
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
