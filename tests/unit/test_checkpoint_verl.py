"""verl's own resume logic finds what hwrl saved."""

import ast
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hwrl.checkpoint import CheckpointManager
from hwrl_cpu import INFO, CpuBackend

FOUND = importlib.util.find_spec("verl")


def _verls_own(name: str) -> Callable[..., Any]:
    """Return a function of verl's checkpoint manager, without importing verl: that takes Ray and a device."""
    assert FOUND is not None and FOUND.origin is not None, "else the test is skipped"
    source = Path(FOUND.origin).parent / "utils" / "checkpoint" / "checkpoint_manager.py"
    parsed = ast.parse(source.read_text())
    parsed.body = [node for node in parsed.body if isinstance(node, ast.FunctionDef)]
    namespace: dict[str, Any] = {"os": os, "torch": torch}
    exec(compile(parsed, source, "exec"), namespace)
    own: Callable[..., Any] = namespace[name]
    return own


@pytest.mark.skipif(FOUND is None, reason="verl is not installed")
@pytest.mark.parametrize("async_save", [False, True])
def test_verl_finds_the_newest_checkpoint(tmp_path: Path, async_save: bool) -> None:
    find_latest = _verls_own("find_latest_ckpt_path")
    assert find_latest(str(tmp_path)) is None
    for step in (1, 2, 10):
        with CheckpointManager(
            tmp_path, max_ckpt_to_keep=1, async_save=async_save, backend=CpuBackend(INFO)
        ) as manager:
            manager.save(step, {"weight": torch.ones(3)})
        assert find_latest(str(tmp_path)) == str(tmp_path / f"global_step_{step}")
