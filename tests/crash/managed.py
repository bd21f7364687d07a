"""hwrl's checkpoint manager as a subject of the matrix, with a trainer on one rank or on several."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from hwrl.checkpoint import CheckpointManager, SaveTuning, find_checkpoints
from hwrl.checkpoint.shards import local_tensors
from hwrl.comm import Comm, PrefixStore, connect_store
from hwrl.errors import HwrlError
from tests.crash.matrix import Session, Subject
from tests.crash.trainers import BACKEND, MakeTrainer, Trainer, whole
from tests.support.roomy import Roomy

TRACKER = "latest_checkpointed_iteration.txt"


class Managed(Subject):
    """A :class:`CheckpointManager` and a trainer from ``make``, on ``ranks`` ranks. They meet at the address ``store``.

    With ``on_device`` an asynchronous save is staged there. With ``own_disks`` each rank is a node with a directory of
    its own, and a step is complete if all have it from one save.
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
        own_disks: bool = False,
        store: str = "",
    ) -> None:
        self.name = f"{name}-{'device' if on_device else 'async' if async_save else 'sync'}-keep{keep}"
        self.async_save, self.on_device, self.keep, self.ranks = async_save, on_device, keep, ranks
        self._make, self._store, self._own_disks = make, store, own_disks

    @contextlib.contextmanager
    def open(self, home: Path, *, rank: int, life: str, timeout_s: float) -> Iterator[Session]:
        with contextlib.ExitStack() as stack:
            group = None
            if self.ranks > 1:
                store = PrefixStore(life, connect_store(self._store))
                group = stack.enter_context(Comm(BACKEND).init_default(store=store, rank=rank, size=self.ranks))
            trainer = stack.enter_context(self._make(group))
            manager = CheckpointManager(
                home / f"node{rank}" if self._own_disks else home,
                max_ckpt_to_keep=self.keep,
                async_save=self.async_save,
                staging="device" if self.on_device else "host",
                group=group,
                backend=Roomy(),
                timeout_s=timeout_s,
                tuning=SaveTuning(look_s=0.1),  # here a file shows at once, or never
            )
            yield _ManagedSession(stack.enter_context(manager), trainer)

    def denies(self, step: int, exc: Exception) -> bool:
        return f"step {step} was not saved" in str(exc)

    def steps(self, home: Path) -> list[int]:
        saved, told = [], []
        for directory in self._directories(home):
            complete, skipped = find_checkpoints(directory)
            assert not skipped, skipped
            saved.append({info.step: info.manifest.save_id for info in complete})
            told.append(int((directory / TRACKER).read_text()))
            assert told[-1] in saved[-1], "the tracker names what is not there"
        steps = sorted(step for step, save_id in saved[0].items() if all(one.get(step) == save_id for one in saved))
        assert max(told) <= max(steps, default=-1), "a tracker names a step that was never on all nodes"
        return steps

    def leftovers(self, home: Path) -> list[str]:
        names = {path.name for directory in self._directories(home) for path in directory.iterdir()}
        names -= {f"global_step_{step}" for step in self.steps(home)[-self.keep :]} | {TRACKER, ".hwrl.lock"}
        # What one node committed and the others did not is put aside.
        return sorted(name for name in names if not (self._own_disks and name.startswith(".broken_")))

    def _directories(self, home: Path) -> list[Path]:
        return [home / f"node{rank}" for rank in range(self.ranks)] if self._own_disks else [home]


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
        if resumed.info.manifest.node == 0:
            says |= {int((resumed.info.path / "hf" / "step.txt").read_text())}
        says |= {int(value) for tensor in _memory(self._trainer.state_dict()) for value in tensor.unique().tolist()}
        damaged = [one for one in resumed.skipped if not one.reason.startswith("of 2 nodes, only")]
        assert says == {resumed.step} and not damaged, (says, resumed.skipped)
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
