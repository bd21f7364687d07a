"""hwrl's callbacks in transformers' Trainer and TRL's GRPOTrainer, and parts in accelerate's loop, change no bit."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, rng_state
from hwrl.memory import Offloader
from hwrl_trl import CheckpointCallback, OffloadCallback
from hwrl_trl.demo import tiny_trainer
from tests.plugins.trl.tiny_trainer import make_trainer
from tests.support.optimizers import OPTIMIZERS, assert_same, frozen

STEPS = 4
KINDS = ["AdamW", "AdamW-fused", "SGD", "SGD-momentum", "Muon", "own"]
KINDS += [kind for kind in OPTIMIZERS if "8bit" in kind]
PARTS = ["checkpoint", "offload", "both"]
CASES = [
    pytest.param(kind, part, marks=[] if kind == "AdamW" or (kind, part) == ("SGD", "both") else pytest.mark.extended)
    for kind in KINDS
    for part in PARTS
]


class Stopped(Exception):
    """Ends a training after two steps, as a kill would."""


def one_optimizer(kind: str, model: Any) -> Any:
    """Return the optimizer of ``kind``. Muon takes matrices only, so the rest is frozen."""
    if kind == "Muon":
        for one in model.parameters():
            one.requires_grad_(one.ndim == 2)
        return torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=0.01)
    return OPTIMIZERS[kind](model)[0]


def state_of(trainer: Any) -> Any:
    wrapped = trainer.optimizer
    return frozen(
        {
            "model": trainer.model.state_dict(),
            "optimizer": getattr(wrapped, "optimizer", wrapped).state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "random numbers": rng_state(),
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        }
    )


def trained(make: Any, kind: str, directory: Path, part: str, *, stops: bool = False) -> Any:
    """Train with ``part``, from the newest checkpoint if there is one; return the state at the end."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):  # type: ignore[misc] # transformers is not followed by the type checker
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if stops and state.global_step == 2:
                raise Stopped

    trainer = make(directory)
    trainer.optimizer = one_optimizer(kind, trainer.model)
    trainer.add_callback(Stop())
    with contextlib.ExitStack() as opened:
        resume_path = None
        if part in ("offload", "both"):
            trainer.add_callback(OffloadCallback())
        if part in ("checkpoint", "both"):
            callback = opened.enter_context(CheckpointCallback(trainer, directory / "checkpoints"))
            resume_path = callback.resume_path()
        trainer.train(resume_from_checkpoint=resume_path)
    return state_of(trainer)


def require_unchanged(make: Any, kind: str, part: str, directory: Path) -> None:
    expected = trained(make, kind, directory / "plain", "none")
    assert_same(trained(make, kind, directory / "fresh", part), expected)
    if part != "offload":
        with pytest.raises(Stopped):
            trained(make, kind, directory / "stopped", part, stops=True)
        assert_same(trained(make, kind, directory / "stopped", part), expected)


def trainer_of_transformers(directory: Path) -> Any:
    strategy = "no" if directory.name == "plain" else "steps"
    return make_trainer(directory, max_steps=STEPS, save_strategy=strategy, save_steps=2)


def trainer_of_trl(directory: Path) -> Any:
    strategy = "no" if directory.name == "plain" else "steps"
    return tiny_trainer(directory, max_steps=STEPS, save_strategy=strategy, save_steps=2)


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_transformers(kind: str, part: str, tmp_path: Path) -> None:
    require_unchanged(trainer_of_transformers, kind, part, tmp_path)


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: ci/stack trl")
@pytest.mark.filterwarnings("default")  # TRL's own
@pytest.mark.parametrize(("kind", "part"), CASES)
def test_grpo(kind: str, part: str, tmp_path: Path) -> None:
    require_unchanged(trainer_of_trl, kind, part, tmp_path)


class Loop:
    """A loop of accelerate, with its wrappers, gradient accumulation and dropout."""

    def __init__(self, kind: str, *, seed: int) -> None:
        from accelerate import Accelerator

        torch.manual_seed(seed)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 32))
        optimizer = one_optimizer(kind, model)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)

    def step(self) -> None:
        for _ in range(2):
            with self.accelerator.accumulate(self.model):
                self.accelerator.backward(self.model(torch.randn(4, 32)).square().mean())
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    @property
    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.schedule}

    def state(self) -> Any:
        states = {name: part.state_dict() for name, part in self.parts.items()}
        return frozen({**states, "random numbers": rng_state()})


@pytest.mark.parametrize(("kind", "part"), CASES)
def test_accelerate(kind: str, part: str, tmp_path: Path) -> None:
    loop = Loop(kind, seed=0)
    for _ in range(STEPS):
        loop.step()
    expected = loop.state()
    for seed, begin in ((0, 0), (1, 2)):
        if begin and part == "offload":
            return
        loop = Loop(kind, seed=seed)
        with contextlib.ExitStack() as opened:
            manager = offloader = None
            if part != "offload":
                manager = opened.enter_context(CheckpointManager(tmp_path / str(seed), **loop.parts))
                if begin:
                    with CheckpointManager(tmp_path / "0", **loop.parts) as saved:
                        assert saved.resume(step=begin) is not None
            if part != "checkpoint":
                offloader = opened.enter_context(Offloader(loop.model, loop.optimizer))
            for step in range(begin, STEPS):
                with contextlib.nullcontext() if offloader is None else offloader.loaded():
                    loop.step()
                if manager is not None:
                    with contextlib.nullcontext() if offloader is None else offloader.lending():
                        manager.save(step + 1, offloader=offloader)
                if offloader is not None:
                    offloader.offload()
        assert_same(loop.state(), expected)
