"""The whole GRPO run on the CPU, where verl and its vLLM are installed: it trains, saves, and resumes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.checkpoint import TRACKER_NAME

pytestmark = [
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("verl", "vllm"))), reason="needs verl and a vLLM for it: docs/verl.md"
    ),
]


def test_the_run_trains_and_resumes(tmp_path: Path) -> None:
    assert run(tmp_path, steps=2).startswith("2 steps, reward from ")
    assert (tmp_path / "checkpoints" / TRACKER_NAME).read_text() == "2"
    assert run(tmp_path, steps=3).startswith("1 steps, reward from ")
    assert (tmp_path / "checkpoints" / TRACKER_NAME).read_text() == "3"


def run(directory: Path, *, steps: int) -> str:
    """Run verl until ``steps``; return the last line that it printed."""
    command = [sys.executable, "-m", "tests.plugins.verl.grpo", "--backend=cpu", f"--steps={steps}"]
    ended = subprocess.run(
        [*command, f"--directory={directory}"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
        check=False,
    )
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-4000:]
    return ended.stdout.splitlines()[-1]
