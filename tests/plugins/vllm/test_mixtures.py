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
    pytest.mark.timeout(600),  # the first call compiles
]


@pytest.mark.parametrize(
    "arguments",
    [["1"], ["2"], pytest.param(["2", "expert_parallel"], marks=pytest.mark.extended)],
    ids=" ".join,
)
def test_tokens_equal_transformers_after_each_update(tmp_path: Path, arguments: list[str]) -> None:
    if int(arguments[0]) > max(2 * (get_backend().info.device_type == "cpu"), get_backend().device_count()):
        pytest.skip("needs a device for each worker")
    write_demo(tmp_path, seed=1, prompts=16, experts=4)
    command = [sys.executable, "-m", "tests.plugins.vllm.mixture", str(tmp_path / "model"), *arguments]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
