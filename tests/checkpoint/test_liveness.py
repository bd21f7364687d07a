"""If a rank dies or freezes in a save, the others name it in time, and go on to save without a restart."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS, find_checkpoints
from hwrl.comm import Comm, Group, connect_store, serve_store, store_address
from hwrl.errors import CheckpointSaveError
from hwrl.testing.processes import Processes, run_processes
from hwrl_cpu import INFO, CpuBackend
from tests.support.speed import slow

BACKEND = CpuBackend(INFO)
TIMEOUT_S, NOTICE_S = slow(4.0), slow(15.0)
PATIENT_S = 600.0  # of ranks that lose nobody: a busy machine may hold one up
RANKS = 3


class Ending(DurableFS):
    """Ends or freezes its process when it is about to sync its own tensors of step 2, or to seal step 2."""

    def __init__(self, rank: int, victim: int, how: signal.Signals) -> None:
        super().__init__()
        self._name = "MANIFEST.json" if victim == 0 else f"__{victim}_0.distcp"
        self._how = how if rank == victim else None

    def before(self, operation: str, path: Path) -> None:
        if self._how and operation == "sync" and path.name == self._name and "step_2" in str(path):
            how, self._how = self._how, None
            os.kill(os.getpid(), how)


def _state(rank: int, step: int) -> dict[str, Any]:
    return {f"of rank {rank}": torch.full((3,), float(step)), "count": step}


def _manager(
    group: Group, directory: Path, fs: DurableFS | None, async_save: bool, *, timeout_s: float = TIMEOUT_S
) -> CheckpointManager:
    return CheckpointManager(
        directory, group=group, backend=BACKEND, timeout_s=timeout_s, async_save=async_save, fs=fs, max_ckpt_to_keep=1
    )


def _fail(manager: CheckpointManager, rank: int, step: int) -> tuple[float, str]:
    began_s = time.monotonic()
    with pytest.raises(CheckpointSaveError) as caught:
        manager.save(step, _state(rank, step))
        manager.wait()
    return time.monotonic() - began_s, str(caught.value)


def _lose_one(rank: int, address: str, directory: Path, victim: int, async_save: bool) -> tuple[float, str]:
    """Save step 1 together, lose ``victim`` in step 2, save step 3 without it."""
    group = Comm(BACKEND).standalone_group(connect_store(address), rank=rank, size=RANKS, name="all")
    manager = _manager(group, directory, Ending(rank, victim, signal.SIGKILL), async_save)
    manager.save(1, _state(rank, 1))
    manager.wait()
    told = _fail(manager, rank, 2)
    manager.close()
    survivors = [one for one in range(RANKS) if one != victim]
    with (
        group.rebuild(survivors=survivors) as rest,
        _manager(rest, directory, None, async_save, timeout_s=PATIENT_S) as again,
    ):
        again.save(3, _state(rest.rank, 3))
    return told


@pytest.mark.parametrize(("victim", "async_save"), [(0, False), (2, True)])
def test_a_rank_that_dies_is_named_in_time_and_the_others_save_without_it(
    tmp_path: Path, victim: int, async_save: bool
) -> None:
    store = serve_store()
    with Processes(_lose_one, RANKS, store_address(store), tmp_path, victim, async_save, timeout_s=1500) as processes:
        for rank in set(range(RANKS)) - {victim}:
            outcome = processes.wait(rank)
            assert outcome.error is None, outcome.error
            after_s, text = outcome.value
            assert after_s < TIMEOUT_S + NOTICE_S
            assert f"no answer from rank {victim}" in text
    info = find_checkpoints(tmp_path)[0]
    assert [(one.step, one.manifest.world_size) for one in info] == [(3, RANKS - 1)]
    assert {path.name for path in tmp_path.iterdir()} == {
        "global_step_3",
        "latest_checkpointed_iteration.txt",
        ".hwrl.lock",
    }


def _freeze_one(rank: int, address: str, directory: Path, victim: int) -> tuple[float, str]:
    group = Comm(BACKEND).standalone_group(connect_store(address), rank=rank, size=2, name="both")
    with _manager(group, directory, Ending(rank, victim, signal.SIGSTOP), False) as manager:
        manager.save(1, _state(rank, 1))
        group.store.set(f"pid{rank}", str(os.getpid()))
        told = _fail(manager, rank, 2)
        if rank != victim:
            os.kill(int(group.store.get(f"pid{victim}")), signal.SIGCONT)
        group.store.set(f"failed{rank}", "")
        group.store.wait([f"failed{victim}"])
        manager.save(3, _state(rank, 3))
    return told


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_freezes_hears_that_the_save_failed_and_takes_part_in_the_next(tmp_path: Path, victim: int) -> None:
    store = serve_store()
    for after_s, text in run_processes(_freeze_one, 2, store_address(store), tmp_path, victim, timeout_s=1500):
        assert after_s < TIMEOUT_S + NOTICE_S
        assert f"no answer from rank {victim}" in text
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == [3]
    assert not list(tmp_path.glob(".tmp*"))


def _wait_for_the_slow(rank: int, address: str, directory: Path) -> None:
    class Slow(DurableFS):
        def before(self, operation: str, path: Path) -> None:
            if operation == "sync" and path.name == "__1_0.distcp":
                time.sleep(1.5 * TIMEOUT_S)  # a slow disk, not synchronisation

    group = Comm(BACKEND).standalone_group(connect_store(address), rank=rank, size=2, name="both")
    with _manager(group, directory, Slow(), False) as manager:
        manager.save(1, _state(rank, 1))


def test_a_rank_that_writes_for_longer_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    store = serve_store()
    run_processes(_wait_for_the_slow, 2, store_address(store), tmp_path, timeout_s=1500)
    assert [info.step for info in find_checkpoints(tmp_path)[0]] == [1]
