"""One configuration file, unchanged, on every backend that runs here: the same loss curve, and it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.discovery import Registry
from hwrl.errors import BackendError
from hwrl.run.demo import write_demo
from hwrl.run.report import Metrics, read_metrics

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
]


def runs_here(name: str) -> bool:
    try:
        Registry(env=os.environ | {"HWRL_BACKEND": name}).choose()
    except BackendError:
        return False
    return True


BACKENDS = [name for name in ("cpu", "cuda", "npu") if runs_here(name)]
# The host alone has nothing to compare with. It learns in ci/npu, beside the simulated NPU, and in `make test-all`.
pytestmark = [pytest.mark.long(40), *([pytest.mark.extended] if BACKENDS == ["cpu"] else [])]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Metrics]]:
    """The metrics of a run on each backend."""
    directory = tmp_path_factory.mktemp("demo")
    config = write_demo(directory, seed=1, prompts=1024)
    found = {}
    for name in BACKENDS:
        command = [HWRL, "train", str(config), *WORDS, f"dir={directory / name}"]
        env = os.environ | {"HWRL_BACKEND": name}
        ended = subprocess.run(command, env=env, text=True, capture_output=True, timeout=280, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        found[name] = read_metrics(directory / name)
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BACKENDS)
def test_it_learns(curves: dict[str, list[Metrics]], name: str) -> None:
    rewards = [line["reward/mean"] for line in curves[name]]
    assert len(rewards) == STEPS
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", BACKENDS[1:])
def test_the_loss_is_that_of_the_host(curves: dict[str, list[Metrics]], name: str) -> None:
    here, there = ([line["actor/loss"] for line in curves[one][:COMPARED]] for one in (name, "cpu"))
    assert here == pytest.approx(there, abs=1e-4)
    assert max(map(abs, there)) > 1e-3, "a loss of nearly nothing compares equal to anything"
