"""hwrl's checkpoint manager as a subject of the matrix, with a trainer on one rank or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from hwrl.checkpoint import CheckpointManager, find_checkpoints
from hwrl.checkpoint.shards import local_tensors
from hwrl.comm import Comm, PrefixStore, connect_store
from hwrl.errors import HwrlError
from tests.crash.matrix import Session, Subject
from tests.crash.trainers import BACKEND, MakeTrainer, Trainer, whole
from tests.support.roomy import Roomy

TRACKER = "latest_checkpointed_iteration.txt"


class Managed(Subject):
    """A :class:`CheckpointManager` and a trainer from ``make``, on ``ranks`` ranks. They meet at the address ``store``.

    With ``on_device`` an asynchronous save is staged there.
    """

    errors = (HwrlError,)

    def __init__(
        self,
        make: MakeTrainer = whole,
        *,
        name: str = "whole",
        async_save: bool,
        on_device: bool = False,
        keep: int,
        ranks: int = 1,
        store: str = "",
    ) -> None:
        self.name = f"{name}-{'device' if on_device else 'async' if async_save else 'sync'}-keep{keep}"
        self.async_save, self.on_device, self.keep, self.ranks = async_save, on_device, keep, ranks
        self._make, self._store = make, store

    @contextlib.contextmanager
    def open(self, home: Path, *, rank: int, life: str, timeout_s: float) -> Iterator[Session]:
        with contextlib.ExitStack() as stack:
            group = None
            if self.ranks > 1:
                store = PrefixStore(life, connect_store(self._store))
                group = stack.enter_context(Comm(BACKEND).init_default(store=store, rank=rank, size=self.ranks))
            trainer = stack.enter_context(self._make(group))
            manager = CheckpointManager(
                home,
                max_ckpt_to_keep=self.keep,
                async_save=self.async_save,
                staging="device" if self.on_device else "host",
                group=group,
                backend=Roomy(),
                timeout_s=timeout_s,
            )
            yield _ManagedSession(stack.enter_context(manager), trainer)

    def denies(self, step: int, exc: Exception) -> bool:
        return f"step {step} was not saved" in str(exc)

    def steps(self, home: Path) -> list[int]:
        complete, skipped = find_checkpoints(home)
        steps = [info.step for info in complete]
        assert not skipped, skipped
        assert int((home / TRACKER).read_text()) in steps, "the tracker names what is not there"
        return steps

    def leftovers(self, home: Path) -> list[str]:
        kept = {f"global_step_{step}" for step in self.steps(home)[-self.keep :]}
        return sorted({path.name for path in home.iterdir()} - kept - {TRACKER, ".hwrl.lock"})


class _ManagedSession(Session):
    def __init__(self, manager: CheckpointManager, trainer: Trainer) -> None:
        self._manager, self._trainer = manager, trainer

    def save(self, step: int) -> None:
        self._manager.save(
            step,
            self._state(step),
            weight_version=step,
            extra={"step": step},
            rank_extra={"step": step},
            export=lambda directory, _: (directory / "step.txt").write_text(str(step)),
        )
        self._manager.wait()

    def resume(self) -> int | None:
        state = self._state(0)
        resumed = self._manager.resume(state)
        if resumed is None:
            return None
        self._trainer.load_state_dict(state)
        says = {resumed.step, resumed.info.weight_version, resumed.extra["step"], state["updates"]}
        says |= {extra["step"] for extra in resumed.rank_extras}
        says |= {int((resumed.info.path / "hf" / "step.txt").read_text())}
        says |= {int(value) for tensor in _memory(self._trainer.state_dict()) for value in tensor.unique().tolist()}
        assert says == {resumed.step} and not resumed.skipped, (says, resumed.skipped)
        return resumed.step

    def _state(self, step: int) -> dict[str, Any]:
        """Have the trainer say ``step`` all over; return its state."""
        state = self._trainer.state_dict() | {"updates": step}
        for tensor in _memory(state):
            tensor.fill_(step)
        return state


def _memory(state: dict[str, Any]) -> list[torch.Tensor]:
    """Return this rank's part of every tensor."""
    return [tensor for _, tensor in local_tensors(flatten_state_dict(state)[0])]
