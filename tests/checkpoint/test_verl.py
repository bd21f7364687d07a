"""verl's resume logic finds hwrl's checkpoints, by its rules in our words: verl is in no environment of hwrl."""

from pathlib import Path

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS
from hwrl_cpu import INFO, CpuBackend


def _find(path: str) -> str | None:
    """Do as verl 0.9.1: believe the tracker; begin afresh without it, or without the directory in it."""
    tracker = Path(path) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    step = int(tracker.read_bytes().decode())
    found = Path(path) / f"global_step_{step}"
    return str(found) if found.exists() else None


class _Watching(DurableFS):
    """Has verl look for a checkpoint at each change of the disk."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.found: list[str | None] = []

    def before(self, operation: str, path: Path) -> None:
        if self._directory.exists():
            self.found.append(_find(str(self._directory)))


@pytest.mark.parametrize("async_save", [False, True])
def test_verl_finds_the_newest_checkpoint_at_any_time(tmp_path: Path, async_save: bool) -> None:
    home = tmp_path / "checkpoints"
    names: list[str | None] = [None]
    for step in (1, 2, 10):
        fs = _Watching(home)
        with CheckpointManager(
            home, max_ckpt_to_keep=1, async_save=async_save, backend=CpuBackend(INFO), fs=fs
        ) as manager:
            manager.save(step, {"weight": torch.ones(3)})
        newest = str(home / f"global_step_{step}")
        names.append(newest)
        assert _find(str(home)) == newest
        assert list(dict.fromkeys(fs.found)) == names[-2:], "the one before until the next is announced, and no other"
        assert int(newest.split("global_step_")[-1]) == step  # so verl reads the step
