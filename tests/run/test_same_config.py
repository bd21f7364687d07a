"""One configuration file, unchanged, on every backend that runs here: the same loss curve, and it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import Metrics, read_metrics
from tests.support.backends import runs_here
from tests.support.speed import slow

HWRL = str(Path(sys.executable).with_name("hwrl"))
STEPS = 40
COMPARED = 20
# On-policy and without offset in time, or the order in which responses come in would be different each time.
WORDS = [
    f"train.steps={STEPS}",
    "train.batch_groups=16",
    "async_training.staleness_threshold=0",
    "optimizer.learning_rate=3e-3",
    "checkpoint.save_every_steps=0",
    "eval.every_steps=0",
    "eval.prompts=16",
    "goals={}",
    f"timeouts.heartbeat_s={slow(60)}",
    f"weights.timeout_s={slow(60)}",
]


BACKENDS = [name for name in ("cpu", "cuda", "npu") if runs_here(name)]
# The host alone has nothing to compare with. It learns in ci/npu, beside the simulated NPU, and in `make test-all`.
pytestmark = [pytest.mark.long(90), *([pytest.mark.extended] if BACKENDS == ["cpu"] else [])]


def curve(config: Path, name: str) -> list[Metrics]:
    """Return the metrics of a run on the backend ``name``."""
    directory = config.parent / name
    command = [HWRL, "train", str(config), *WORDS, f"dir={directory}"]
    env = os.environ | {"HWRL_BACKEND": name}
    ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=2800, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return read_metrics(directory)


def test_it_learns_on_every_backend_with_the_losses_of_the_host(tmp_path: Path) -> None:
    config = write_demo(tmp_path, seed=1, prompts=1024)
    curves = {name: curve(config, name) for name in BACKENDS}  # in one test: the workers of pytest would each run all
    for lines in curves.values():
        rewards = [line["reward/mean"] for line in lines]
        assert len(rewards) == STEPS
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
        here, there = ([line["actor/loss"] for line in one[:COMPARED]] for one in (lines, curves["cpu"]))
        assert here == pytest.approx(there, abs=1e-4)
        assert max(map(abs, there)) > 1e-3, "a loss of nearly nothing compares equal to anything"
