"""``hwrl train`` where there are fewer devices than processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics

HWRL = str(Path(sys.executable).with_name("hwrl"))
SMALL = ["train.steps=3", "train.batch_groups=4", "rollout.n=4", "eval.prompts=8", "goals={}"]


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds the backend of ``numbered.py`` just as an installer leaves it."""
    (tmp_path / "numbered.py").write_text(Path(__file__).with_name("numbered.py").read_text())
    metadata = tmp_path / "numbered-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numbered\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[hwrl.backends]\nnumbered = numbered\n")
    return tmp_path


def train(site: Path, *words: str, devices: int) -> subprocess.CompletedProcess[str]:
    config = str(write_demo(site / "demo", seed=1, prompts=64))
    path = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": path, "HWRL_BACKEND": "numbered", "NUMBERED_DEVICES": str(devices)}
    return subprocess.run(
        [HWRL, "train", config, *SMALL, *words], env=env, text=True, capture_output=True, timeout=150, check=False
    )


def test_replicas_share_the_trainers_devices_and_open_its_memory(site: Path) -> None:
    ended = train(site, "train.ranks=2", "rollout.replicas=2", devices=2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "too few devices (2), so replicas share the trainer's; weights travel by ipc" in ended.stdout
    metrics = read_metrics(site / "demo" / "run")
    assert [line["sync/receivers"] for line in metrics] == [2.0] * 3, "the replica on another device missed a version"


def test_ranks_do_not_share(site: Path) -> None:
    ended = train(site, "train.ranks=2", devices=1)
    assert ended.returncode != 0
    assert "train.ranks=2 share none, and 1 are free" in ended.stdout + ended.stderr
