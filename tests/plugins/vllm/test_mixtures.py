"""Real vLLM serves mixtures of experts that are sent one expert at a time: tokens equal transformers'."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.discovery import get_backend
from hwrl.run.demo import write_demo

REPO = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]


@pytest.mark.parametrize(
    "arguments",
    [["1"], ["2"], pytest.param(["2", "expert_parallel"], marks=pytest.mark.extended)],
    ids=" ".join,
)
def test_tokens_equal_transformers_after_each_update(tmp_path: Path, arguments: list[str]) -> None:
    on_host = get_backend().info.device_type == "cpu"
    if on_host and "expert_parallel" in arguments:
        pytest.skip("vLLM 0.32 for CPUs dies there: its kernel takes the numbers of all experts for those of its own")
    if not on_host and int(arguments[0]) > get_backend().device_count():
        pytest.skip("needs a device for each worker")
    write_demo(tmp_path, seed=1, prompts=16, experts=4)
    command = [sys.executable, "-m", "tests.plugins.vllm.mixture", str(tmp_path / "model"), *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=5000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
