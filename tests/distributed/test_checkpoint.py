"""The promises of CheckpointManager on several real ranks: FSDP2, resharding, agreement, a rank that fails."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hwrl.checkpoint import CheckpointManager, DurableFS, find_checkpoints
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.errors import CheckpointError, CheckpointNotFoundError, CheckpointSaveError
from hwrl.testing.processes import run_processes
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
ROWS = 7  # odd: the ranks' shards differ in size


class Training:
    """A model and its optimizer, sharded over the group's ranks; whole if there is no group."""

    def __init__(self, group: Group | None, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, ROWS), nn.Linear(ROWS, ROWS))
        if group is not None:
            mesh = init_device_mesh("cpu", (group.size,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self) -> float:
        loss: torch.Tensor = self.model(torch.arange(12.0).reshape(3, 4).sin()).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "plain": torch.tensor([1.0, 2.0]), "step": 2}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _group(rank: int, address: str, *, size: int = 2) -> Group:
    return Comm(BACKEND).init_default(store=connect_store(address), rank=rank, size=size)


def _train_and_save(group: Group | None, directory: Path, *, async_save: bool) -> list[float]:
    training = Training(group, seed=0)
    for _ in range(2):
        training.step()
    rank = 0 if group is None else group.rank
    with CheckpointManager(directory, async_save=async_save, group=group, backend=BACKEND) as manager:
        manager.save(
            2,
            training.state(),
            weight_version=5,
            extra={"from": rank},
            rank_extra={"seed": 100 + rank},
            export=lambda hf: (hf / "rank.txt").write_text(str(rank)),
        )
        return [training.step() for _ in range(3)]


def _resume_and_train(group: Group | None, directory: Path) -> list[float]:
    training = Training(group, seed=1)
    with CheckpointManager(directory, group=group, backend=BACKEND) as manager:
        state = training.state()
        resumed = manager.resume(state)
        assert resumed is not None and resumed.info.weight_version == 5
        assert resumed.extra == {"from": 0}
        assert resumed.rank_extras == [{"seed": 100 + rank} for rank in range(resumed.info.manifest.world_size)]
        training.load(state)
    return [training.step() for _ in range(3)]


def _save_on_two(rank: int, address: str, directory: Path, async_save: bool) -> list[float]:
    with _group(rank, address) as group:
        return _train_and_save(group, directory, async_save=async_save)


def _resume_on_two(rank: int, address: str, directory: Path) -> list[float]:
    with _group(rank, address) as group:
        return _resume_and_train(group, directory)


@pytest.mark.parametrize("async_save", [False, True])
def test_two_ranks_save_and_two_or_one_resume(tmp_path: Path, async_save: bool) -> None:
    store = serve_store()
    losses = run_processes(_save_on_two, 2, store_address(store), tmp_path, async_save)
    assert losses[0] == losses[1]
    info = find_checkpoints(tmp_path)[0][0]
    assert info.manifest.world_size == 2
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(info.manifest.files)
    assert (info.path / "hf" / "rank.txt").read_text() == "0"
    store = serve_store()
    assert run_processes(_resume_on_two, 2, store_address(store), tmp_path) == losses
    assert _resume_and_train(None, tmp_path) == pytest.approx(losses[0], rel=1e-5)


def test_one_rank_saves_and_two_resume(tmp_path: Path) -> None:
    losses = _train_and_save(None, tmp_path, async_save=False)
    store = serve_store()
    for other in run_processes(_resume_on_two, 2, store_address(store), tmp_path):
        assert other == pytest.approx(losses, rel=1e-5)


class FullDisk(DurableFS):
    """Has no room for one rank's data."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name = f"__{rank}_0.distcp"

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.name == self.name and "step_2" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _fill_the_disk(rank: int, address: str, directory: Path, async_save: bool) -> list[str]:
    with _group(rank, address) as group:
        manager = CheckpointManager(directory, async_save=async_save, group=group, backend=BACKEND, fs=FullDisk(1))
        reasons: list[str] = []
        state = Training(group, seed=0).state()
        for step in (1, 2, 3):
            try:
                manager.save(step, state)
                manager.wait()
            except CheckpointSaveError as exc:
                reasons.append(f"{step}: {exc}")
        manager.close()
        return reasons


@pytest.mark.parametrize("async_save", [False, True])
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(tmp_path: Path, async_save: bool) -> None:
    store = serve_store()
    for reasons in run_processes(_fill_the_disk, 2, store_address(store), tmp_path, async_save):
        assert len(reasons) == 1 and reasons[0].startswith("2:") and "No space left" in reasons[0]
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == [1, 3]
    assert not list(tmp_path.glob(".tmp*"))


def _disagree(rank: int, address: str, directory: Path) -> list[str]:
    """Errors of both kinds of disagreement, and of a rank that does not come."""
    texts: list[str] = []
    with _group(rank, address) as group:
        manager = CheckpointManager(directory, group=group, backend=BACKEND, timeout_s=0.5)
        for step in (rank, None if rank == 1 else 5):
            try:
                if step is not None:
                    manager.save(step, {"weight": torch.ones(2)})
            except CheckpointError as exc:
                texts.append(str(exc))
        group.barrier()
        manager.close()
    return texts


def test_ranks_at_different_steps_and_a_missing_rank_are_named(tmp_path: Path) -> None:
    store = serve_store()
    here, there = run_processes(_disagree, 2, store_address(store), tmp_path)
    assert "the ranks are at steps [0, 1]" in here[0]
    assert "the ranks are at steps [0, 1]" in there[0]
    assert "no answer from rank 1 of 2" in here[1]
    assert find_checkpoints(tmp_path) == ([], [])


def _resume_damaged(rank: int, address: str, directory: Path) -> str:
    with _group(rank, address) as group, CheckpointManager(directory, group=group, backend=BACKEND) as manager:
        try:
            manager.resume(Training(group, seed=0).state())
        except CheckpointError as exc:
            return f"{type(exc).__name__}: {exc}"
    return "resumed"


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])  # the first and the second rank's share
def test_a_damaged_file_is_found_whichever_rank_reads_it(tmp_path: Path, name: str) -> None:
    _train_and_save(None, tmp_path, async_save=False)
    path = tmp_path / "global_step_2" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    store = serve_store()
    for text in run_processes(_resume_damaged, 2, store_address(store), tmp_path):
        assert CheckpointNotFoundError.__name__ in text and name in text


def _open_second(rank: int, address: str, directory: Path) -> str:
    with _group(rank, address) as group:
        try:
            CheckpointManager(directory, group=group, backend=BACKEND)
        except CheckpointError as exc:
            return str(exc)
    return "opened"


def test_all_ranks_hear_that_the_directory_has_a_writer(tmp_path: Path) -> None:
    store = serve_store()
    with CheckpointManager(tmp_path, backend=BACKEND):
        for text in run_processes(_open_second, 2, store_address(store), tmp_path):
            assert "already has a writer" in text and f'"pid": {os.getpid()}' in text
