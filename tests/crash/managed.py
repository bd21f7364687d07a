"""What the matrix drives: hwrl's checkpoint manager, on one rank or on several with FSDP2."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # fully_shard imports it when it is first called: once here, and not in every life
from torch import nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from hwrl.checkpoint import CheckpointManager, find_checkpoints
from hwrl.comm import Comm, Group, connect_store
from hwrl.errors import HwrlError
from hwrl_cpu import INFO, CpuBackend
from tests.crash.matrix import Session, Subject

BACKEND = CpuBackend(INFO)
TRACKER = "latest_checkpointed_iteration.txt"
ROWS = 5  # odd: the ranks' shards differ in size


class Managed(Subject):
    """A :class:`CheckpointManager` and a model that ``fully_shard`` split over ``ranks``; whole on one rank.

    ``store`` is the address where the ranks meet.
    """

    errors = (HwrlError,)

    def __init__(self, *, async_save: bool, keep: int, ranks: int = 1, store: str = "") -> None:
        self.async_save, self.keep, self.ranks = async_save, keep, ranks
        self._store = store

    @contextlib.contextmanager
    def open(self, home: Path, *, rank: int, life: str, timeout_s: float) -> Iterator[Session]:
        with contextlib.ExitStack() as stack:
            group = None
            if self.ranks > 1:
                store = PrefixStore(life, connect_store(self._store))
                group = stack.enter_context(Comm(BACKEND).init_default(store=store, rank=rank, size=self.ranks))
            manager = CheckpointManager(
                home,
                max_ckpt_to_keep=self.keep,
                async_save=self.async_save,
                group=group,
                backend=BACKEND,
                timeout_s=timeout_s,
            )
            yield _ManagedSession(stack.enter_context(manager), group)

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
    def __init__(self, manager: CheckpointManager, group: Group | None) -> None:
        self._manager = manager
        self._model = nn.Linear(3, ROWS)
        if group is not None:
            fully_shard(self._model, mesh=init_device_mesh("cpu", (group.size,)))

    def save(self, step: int) -> None:
        self._manager.save(
            step,
            self._state(step),
            weight_version=step,
            extra={"step": step},
            rank_extra={"step": step},
            export=lambda directory: (directory / "step.txt").write_text(str(step)),
        )
        self._manager.wait()

    def resume(self) -> int | None:
        state = self._state(0)
        resumed = self._manager.resume(state)
        if resumed is None:
            return None
        says = {resumed.step, resumed.info.weight_version, resumed.extra["step"], state["step"]}
        says |= {extra["step"] for extra in resumed.rank_extras}
        says |= {int((resumed.info.path / "hf" / "step.txt").read_text())}
        says |= {int(value) for tensor in state["model"].values() for value in _local(tensor).unique().tolist()}
        assert says == {resumed.step} and not resumed.skipped, (says, resumed.skipped)
        return resumed.step

    def _state(self, step: int) -> dict[str, Any]:
        state: dict[str, Any] = {"model": get_model_state_dict(self._model), "step": step}
        for tensor in state["model"].values():
            _local(tensor).fill_(float(step))
        return state


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
