"""verl's resume logic finds hwrl's checkpoints: by its rules in our words, and by its own code if it is installed."""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager, DurableFS
from hwrl_cpu import INFO, CpuBackend

Find = Callable[[str], str | None]
INSTALLED = importlib.util.find_spec("verl")  # in no environment of hwrl: it needs Ray, a device, and a minute to come


def _find_by_verls_rules(path: str) -> str | None:
    """Do as verl 0.9.1: believe the tracker; begin afresh without it, or without the directory in it."""
    tracker = Path(path) / "latest_checkpointed_iteration.txt"
    if not tracker.exists():
        return None
    step = int(tracker.read_bytes().decode())
    found = Path(path) / f"global_step_{step}"
    return str(found) if found.exists() else None


def _find_by_verls_code(path: str) -> str | None:
    """Call verl's function without importing verl."""
    assert INSTALLED is not None and INSTALLED.origin is not None, "else the test is skipped"
    source = Path(INSTALLED.origin).parent / "utils" / "checkpoint" / "checkpoint_manager.py"
    parsed = ast.parse(source.read_text())
    parsed.body = [node for node in parsed.body if isinstance(node, ast.FunctionDef)]
    namespace: dict[str, Any] = {"os": os, "torch": torch}
    exec(compile(parsed, source, "exec"), namespace)
    found: str | None = namespace["find_latest_ckpt_path"](path)
    return found


FINDERS = [
    _find_by_verls_rules,
    pytest.param(_find_by_verls_code, marks=pytest.mark.skipif(INSTALLED is None, reason="verl is not installed")),
]


class _Watching(DurableFS):
    """Has ``find`` look for a checkpoint at each change of the disk."""

    def __init__(self, directory: Path, find: Find) -> None:
        super().__init__()
        self._directory, self._find = directory, find
        self.found: list[str | None] = []

    def before(self, operation: str, path: Path) -> None:
        if self._directory.exists():
            self.found.append(self._find(str(self._directory)))


@pytest.mark.parametrize("find", FINDERS)
@pytest.mark.parametrize("async_save", [False, True])
def test_verl_finds_the_newest_checkpoint_at_any_time(tmp_path: Path, find: Find, async_save: bool) -> None:
    home = tmp_path / "checkpoints"
    names: list[str | None] = [None]
    for step in (1, 2, 10):
        fs = _Watching(home, find)
        with CheckpointManager(
            home, max_ckpt_to_keep=1, async_save=async_save, backend=CpuBackend(INFO), fs=fs
        ) as manager:
            manager.save(step, {"weight": torch.ones(3)})
        newest = str(home / f"global_step_{step}")
        names.append(newest)
        assert find(str(home)) == newest
        assert list(dict.fromkeys(fs.found)) == names[-2:], "the one before until the next is announced, and no other"
        assert int(newest.split("global_step_")[-1]) == step  # so verl reads the step
