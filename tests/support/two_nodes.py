"""Ranks on two nodes with disks of their own: the directories ``node0`` and ``node1`` of a test's directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hwrl.checkpoint import CheckpointManager, DurableFS, LocalShards, SaveTuning
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
TRACKER = "latest_checkpointed_iteration.txt"
TUNING = SaveTuning(look_s=0.1)  # here a file shows at once, or never


def disk(home: Path, node: int) -> Path:
    return home / f"node{node}"


def state_of(group: Group, step: int) -> dict[str, Any]:
    """Return a tensor divided over the ranks, an equal tensor of all ranks, and a number: all hold ``step``."""
    row = torch.full((1, 3), float(step)) + group.rank
    return {
        "divided": LocalShards((group.size, 3), row.dtype, {(group.rank, 0): row}),
        "same": row[0] - group.rank,
        "n": step,
    }


def open_manager(group: Group, directory: Path, *, fs: DurableFS | None = None, **options: Any) -> CheckpointManager:
    return CheckpointManager(directory, group=group, backend=BACKEND, fs=fs, tuning=TUNING, **options)


def save(manager: CheckpointManager, group: Group, step: int) -> None:
    manager.save(step, state_of(group, step), extra={"step": step}, rank_extra={"step": step, "rank": group.rank})
    manager.wait()


def resume(manager: CheckpointManager, group: Group) -> int | None:
    """Resume and check all loaded values; return the step, None if there is none."""
    state = state_of(group, -9)
    found = manager.resume(state)
    if found is None:
        return None
    step = found.step
    assert torch.equal(state["divided"].pieces[(group.rank, 0)], torch.full((1, 3), float(step + group.rank)))
    assert torch.equal(state["same"], torch.full((3,), float(step))) and state["n"] == step
    assert found.extra == {"step": step}
    assert found.rank_extras == [{"step": step, "rank": rank} for rank in range(group.size)]
    return step


def on_ranks(target: Callable[..., Any], size: int, home: Path, *args: Any) -> list[Any]:
    """Run ``target(group, home, *args)`` on each rank; half of the ranks are on each of two nodes."""
    store = serve_store()
    return run_processes(_on_rank, size, store_address(store), target, size, home, *args, timeout_s=1000)


def _on_rank(rank: int, address: str, target: Callable[..., Any], size: int, home: Path, *args: Any) -> Any:
    return target(group_of(rank, address, size), disk(home, rank * 2 // size), *args)


def group_of(rank: int, address: str, size: int, *, name: str = "all") -> Group:
    return Comm(BACKEND).standalone_group(connect_store(address), rank=rank, size=size, name=name)
