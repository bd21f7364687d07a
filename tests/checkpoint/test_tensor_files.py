"""Writing a state into several files at a time, and the host memory for its copy."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS, SaveTuning
from hwrl.errors import CheckpointSaveError
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)
FOUR_FILES = SaveTuning(max_files=4, min_file_nbytes=64)


def state_of(step: int, *, width: int = 64) -> dict[str, Any]:
    tensors = {f"w{number}": torch.full((width, number + 1), float(step)) for number in range(6)}
    return {**tensors, "t": torch.full((3, 5), float(step)).T, "step": step}


def zeros_like(state: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.zeros_like(one) if isinstance(one, torch.Tensor) else None for name, one in state.items()}


def assert_saved(directory: Path, expected: dict[str, Any]) -> None:
    found = zeros_like(expected)
    with CheckpointManager(directory, backend=BACKEND) as manager:
        assert manager.resume(found) is not None
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value, name


class Meeting(DurableFS):
    """Lets no file of tensors be created before as many are about to be as there are to be."""

    def __init__(self, parties: int, broken: str = "") -> None:
        super().__init__()
        self._all_here, self._broken = threading.Barrier(parties), broken

    def before(self, operation: str, path: Path) -> None:
        if operation == "create" and path.suffix == ".distcp":
            self._all_here.wait(300)
        if operation == "sync" and path.name == self._broken:
            raise OSError(28, "No space left on device", str(path))


@pytest.mark.parametrize("async_save", [False, True])
def test_much_state_is_written_into_several_files_at_a_time(tmp_path: Path, async_save: bool) -> None:
    fs = Meeting(FOUR_FILES.max_files)
    with CheckpointManager(tmp_path, async_save=async_save, backend=BACKEND, fs=fs, tuning=FOUR_FILES) as manager:
        manager.save(1, state_of(1))
        manager.wait()
        files = manager.checkpoints()[0].manifest.files
    sizes = [record.nbytes for name, record in files.items() if name.endswith(".distcp")]
    assert len(sizes) == FOUR_FILES.max_files
    assert max(sizes) < sum(sizes) / 2, "one file has most of it"
    assert_saved(tmp_path, state_of(1))


def test_one_file_that_cannot_be_written_fails_the_save(tmp_path: Path) -> None:
    fs = Meeting(FOUR_FILES.max_files, "__0_2.distcp")
    with CheckpointManager(tmp_path, backend=BACKEND, fs=fs, tuning=FOUR_FILES) as manager:
        with pytest.raises(CheckpointSaveError, match=r"No space left on device.*__0_2\.distcp"):
            manager.save(1, state_of(1))
        assert manager.checkpoints() == [] and not list(tmp_path.glob(".tmp*"))


class Counting(CpuBackend):
    """Counts the requests for page-locked memory."""

    def __init__(self) -> None:
        super().__init__(INFO)
        self.requests = 0

    def register_host_memory(self, memory: torch.Tensor) -> None:
        self.requests += 1


def test_staging_memory_is_kept_and_follows_a_state_that_changes(tmp_path: Path) -> None:
    held, backend = [], Counting()
    with CheckpointManager(tmp_path, async_save=True, backend=backend) as manager:
        for step, width in enumerate((64, 64, 128, 32), start=1):
            state = state_of(step, width=width)
            held.append((manager.save(step, state, extra={"width": width}).held_nbytes, backend.requests))
            for name, value in state_of(-1, width=width).items():
                if isinstance(value, torch.Tensor):
                    state[name].copy_(value)
    assert held[0] == held[1] < held[2] == held[3]
    assert_saved(tmp_path, state_of(4, width=32))
