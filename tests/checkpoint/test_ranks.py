"""The promises of CheckpointManager on several real ranks: FSDP2, resharding, agreement, a failing rank."""

import contextlib
import errno
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import hwrl
from hwrl.checkpoint import CheckpointManager, DurableFS, SavedTensors, SaveTuning, find_checkpoints, read_tensors
from hwrl.comm import Comm, Group, PrefixStore, connect_store, serve_store, store_address
from hwrl.errors import CheckpointError, CheckpointSaveError
from hwrl.testing.processes import run_processes
from tests.support.roomy import Roomy
from tests.support.speed import slow

BACKEND = hwrl.get_backend()
ROWS = 7  # odd: the ranks' shards differ in size


class Training:
    """A model and its optimizer, sharded over the group's ranks; whole if there is no group."""

    def __init__(self, group: Group | None, *, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, ROWS), nn.Linear(ROWS, ROWS)).to(BACKEND.device())
        if group is not None:
            mesh = init_device_mesh(BACKEND.info.device_type, (group.size,))
            for layer in self.model:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)

    def step(self) -> float:
        data = torch.arange(12.0).reshape(3, 4).sin().to(BACKEND.device())
        loss: torch.Tensor = self.model(data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "plain": torch.tensor([1.0, 2.0]), "step": 2}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _on_two_ranks(target: Callable[..., Any], *args: Any) -> list[Any]:
    store = serve_store()
    return run_processes(_on_rank, 2, store_address(store), target, *args)


def _on_rank(rank: int, address: str, target: Callable[..., Any], *args: Any) -> Any:
    BACKEND.set_device(rank % BACKEND.device_count())
    with Comm(BACKEND).init_default(store=connect_store(address), rank=rank, size=2) as group:
        return target(group, *args)


def _train_and_save(group: Group | None, directory: Path, **options: Any) -> list[float]:
    training = Training(group, seed=0)
    for _ in range(2):
        training.step()
    rank = 0 if group is None else group.rank
    state = {**training.state(), "rank": rank}
    backend = Roomy() if BACKEND.info.fallback else BACKEND
    with CheckpointManager(directory, group=group, backend=backend, **options) as manager:
        report = manager.save(
            2,
            state,
            weight_version=5,
            extra={"from": rank},
            rank_extra={"seed": 100 + rank},
            export=functools.partial(_export, rank),
            after_commit=lambda info: (directory / "committed.txt").write_text(f"{rank}: {info.step}"),
        )
        assert (report.cloned_nbytes > 0) is ("staging" in options)
        return [training.step() for _ in range(3)]


def _export(rank: int, directory: Path, saved: SavedTensors) -> None:
    (directory / "rank.txt").write_text(str(rank))
    torch.save(saved["model.0.weight"], directory / "weight.pt")


def _resume_and_train(group: Group | None, directory: Path) -> list[float]:
    training = Training(group, seed=1)
    with CheckpointManager(directory, group=group, backend=BACKEND) as manager:
        state = {**training.state(), "rank": -1}
        resumed = manager.resume(state)
        assert resumed is not None and resumed.info.weight_version == 5
        assert state["rank"] == 0, "of what ranks have differently, the lowest one's is saved"
        assert resumed.extra == {"from": 0}
        assert resumed.rank_extras == [{"seed": 100 + rank} for rank in range(resumed.info.manifest.world_size)]
        training.load(state)
    return [training.step() for _ in range(3)]


MODES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"async_save": True},
    "device": {"async_save": True, "staging": "device", "tuning": SaveTuning(max_item_nbytes=48)},
}


def _save_and_resume(group: Group, directory: Path) -> dict[str, list[list[float]]]:
    losses = {}
    for name, options in MODES.items():
        losses[name] = [_train_and_save(group, directory / name, **options)]
        losses[name].append(_resume_and_train(group, directory / name))
    return losses


def test_two_ranks_save_and_two_or_one_resume(tmp_path: Path) -> None:
    here, there = _on_two_ranks(_save_and_resume, tmp_path)
    assert here == there
    for name, (trained, resumed) in here.items():
        assert resumed == trained
        assert _resume_and_train(None, tmp_path / name) == pytest.approx(trained, rel=1e-4)
        info = find_checkpoints(tmp_path / name)[0][0]
        assert info.manifest.world_size == 2
        assert {"__0_0.distcp", "__1_0.distcp"} <= set(info.manifest.files)
        assert (info.path / "hf" / "rank.txt").read_text() == "0"
        assert (tmp_path / name / "committed.txt").read_text() == "0: 2"
        assert torch.equal(torch.load(info.path / "hf" / "weight.pt"), read_tensors(info, prefix="model.")["0.weight"])


RESHARDINGS = [(1, 2), (1, 4), (4, 2), (2, 4), (4, 1)]
"""Pairs of the number of ranks that save and the number of ranks that resume."""


def _save_and_resume_on_some(rank: int, address: str, directory: Path) -> dict[str, list[float]]:
    """Save on the first 1, 2 and 4 ranks, then resume on other numbers of ranks; return the losses after each."""
    losses: dict[str, list[float]] = {}
    for size in (1, 2, 4):
        with _first_ranks(rank, address, f"save on {size}", size) as [takes_part, group]:
            if takes_part:
                losses[f"{size} trained"] = _train_and_save(group, directory / str(size), async_save=True)
    for saved, size in RESHARDINGS:
        with _first_ranks(rank, address, f"resume {saved} on {size}", size) as [takes_part, group]:
            if takes_part:
                losses[f"{saved} resumed on {size}"] = _resume_and_train(group, directory / str(saved))
    return losses


@contextlib.contextmanager
def _first_ranks(rank: int, address: str, name: str, size: int) -> Iterator[tuple[bool, Group | None]]:
    """Yield whether this rank of four is among the first ``size``, and their group; the others wait at the end."""
    store = PrefixStore(name, connect_store(address))
    if rank >= size or size == 1:
        yield rank < size, None
    else:
        with Comm(BACKEND).init_default(store=store, rank=rank, size=size) as group:
            yield True, group
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(4)])


def test_another_number_of_ranks_resumes(tmp_path: Path) -> None:
    store = serve_store()
    ranks = run_processes(_save_and_resume_on_some, 4, store_address(store), tmp_path, timeout_s=1500)
    for saved, size in RESHARDINGS:
        for losses in ranks[:size]:
            assert losses[f"{saved} resumed on {size}"] == pytest.approx(ranks[0][f"{saved} trained"], rel=1e-4)


class FullDisk(DurableFS):
    """Has no room for one rank's data."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.name = f"__{rank}_0.distcp"

    def before(self, operation: str, path: Path) -> None:
        if operation == "sync" and path.name == self.name and "step_2" in str(path):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def _fill_the_disk(group: Group, directory: Path) -> dict[str, list[str]]:
    state = Training(group, seed=0).state()
    return {name: _errors_of_three_saves(group, directory / name, state, mode) for name, mode in MODES.items()}


def _errors_of_three_saves(group: Group, directory: Path, state: dict[str, Any], options: dict[str, Any]) -> list[str]:
    reasons: list[str] = []
    with CheckpointManager(directory, group=group, backend=BACKEND, fs=FullDisk(1), **options) as manager:
        for step in (1, 2, 3):
            try:
                manager.save(step, state)
                manager.wait()
            except CheckpointSaveError as exc:
                reasons.append(str(exc))
    return reasons


def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_save_works(tmp_path: Path) -> None:
    here, there = _on_two_ranks(_fill_the_disk, tmp_path)
    for name in MODES:
        assert len(here[name]) == len(there[name]) == 1, "step 2 only"
        assert "step 2 was not saved\n  why: rank 1: OSError: [Errno 28]" in here[name][0]
        assert "step 2 was not saved\n  why: OSError: [Errno 28]" in there[name][0]
        assert "; \n" not in here[name][0], "no separator without a second reason"
        assert [info.step for info in find_checkpoints(tmp_path / name)[0]] == [1, 3]
        assert not list((tmp_path / name).glob(".tmp*"))


def _disagree(group: Group, directory: Path) -> list[str]:
    """Errors of both kinds of disagreement, and of a missing rank."""
    texts: list[str] = []
    group.barrier()  # a rank may be slow to come, on devices
    manager = CheckpointManager(directory, group=group, backend=BACKEND, timeout_s=slow(5.0))
    for step in (group.rank, None if group.rank == 1 else 5):
        try:
            if step is not None:
                manager.save(step, {"weight": torch.ones(2)})
        except CheckpointSaveError as exc:
            texts.append(str(exc))
    group.barrier()
    manager.close()
    return texts


def test_ranks_at_different_steps_and_a_missing_rank_are_named(tmp_path: Path) -> None:
    here, there = _on_two_ranks(_disagree, tmp_path)
    assert "the ranks called save with different steps: [0, 1]" in here[0]
    assert "the ranks called save with different steps: [0, 1]" in there[0]
    assert "no answer from rank 1" in here[1]
    assert find_checkpoints(tmp_path) == ([], [])


def _resume_refused(group: Group, directories: list[Path]) -> list[str]:
    texts: list[str] = []
    state = Training(group, seed=0).state()
    for directory in directories:
        try:
            with CheckpointManager(directory, group=group, backend=BACKEND) as manager:
                manager.resume(state)
        except CheckpointError as exc:
            texts.append(f"{type(exc).__name__}: {exc}")
    return texts


def _damage(directory: Path, name: str) -> Path:
    _train_and_save(None, directory, async_save=False)
    path = directory / "global_step_2" / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    return directory


def test_all_ranks_raise_the_same_whichever_of_them_finds_the_reason(tmp_path: Path) -> None:
    first, second = (_damage(tmp_path / name, name) for name in (".metadata", "__0_0.distcp"))  # of each rank's share
    owned = tmp_path / "owned"
    with CheckpointManager(owned, backend=BACKEND):
        results = _on_two_ranks(_resume_refused, [first, second, owned])
    for texts in results:
        assert texts[0].startswith("CheckpointNotFoundError") and ".metadata does not match" in texts[0]
        assert texts[1].startswith("CheckpointNotFoundError") and "__0_0.distcp does not match" in texts[1]
        assert texts[2].startswith("CheckpointError") and f"process {os.getpid()} on" in texts[2]
