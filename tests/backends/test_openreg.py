"""hwrl on PyTorch's reference device, which nobody of hwrl wrote, in real processes. Needs a build of it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics

pytestmark = [
    pytest.mark.long(60),
    pytest.mark.skipif(
        importlib.util.find_spec("torch_openreg") is None,
        reason="torch_openreg is not installed: build PyTorch's reference device (docs/requirements.md)",
    ),
]

HWRL = str(Path(sys.executable).with_name("hwrl"))
BACKEND = Path(__file__).parents[1] / "support" / "openreg.py"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the backend of ``openreg.py``, as after an installation."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "hwrl_openreg.py").write_text(BACKEND.read_text())
    metadata = folder / "hwrl_openreg-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hwrl-openreg\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[hwrl.backends]\nopenreg = hwrl_openreg\n")
    return folder


def hwrl(site: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(site), *filter(None, sys.path)])
    env = os.environ | {"PYTHONPATH": path, "HWRL_BACKEND": "openreg", "OMP_NUM_THREADS": "1"} | variables
    return subprocess.run([HWRL, *words], env=env, text=True, capture_output=True, timeout=4000, check=False)


def train(site: Path, directory: Path, *words: str) -> str:
    """Train the demo and return the run's output in one line."""
    config = str(write_demo(directory, seed=1, prompts=64))
    ended = hwrl(site, "train", config, "goals={}", *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return " ".join(ended.stdout.split())


def test_the_doctor_finds_it_and_says_what_it_lacks(site: Path) -> None:
    report = json.loads(hwrl(site, "doctor", "--json").stdout)
    assert report["ok"] and report["live"]["device_count"] == 2
    assert report["live"]["capabilities"]["collectives"][0] == "unsupported"


def test_the_doctor_refuses_it_with_its_own_attention(site: Path) -> None:
    ended = hwrl(site, "doctor", OPENREG_STUB="1")
    assert ended.returncode == 1
    assert "a small model" in ended.stdout


def test_it_conforms(site: Path) -> None:
    ended = hwrl(site, "conformance", "openreg")
    assert ended.returncode == 0, ended.stdout
    assert "TestComm" in ended.stdout and " failed" not in ended.stdout.partition("backend openreg")[0].splitlines()[-1]


def test_each_of_two_processes_has_a_device_and_ranks_train_on_a_staged_group(site: Path, tmp_path: Path) -> None:
    small = ["train.steps=3", "train.batch_groups=4", "rollout.n=4", "eval.prompts=8"]
    said = train(site, tmp_path / "apart", *small)
    assert "trainer rank 0 on device 0, replica-0 on device 1; each process has its own" in said
    said = train(site, tmp_path / "ranks", *small, "train.ranks=2")
    assert "trainer rank 0 on device 0, trainer rank 1 on device 1, replica-0 on device 0" in said
    apart, ranks = (read_metrics(tmp_path / name / "run") for name in ("apart", "ranks"))
    assert len(apart) == len(ranks) == 3


@pytest.mark.extended
def test_fifty_steps_of_the_demo_learn(site: Path, tmp_path: Path) -> None:
    train(site, tmp_path, "train.steps=50")
    rewards = [line["reward/mean"] for line in read_metrics(tmp_path / "run")]
    assert len(rewards) == 50
    assert sum(rewards[-5:]) > sum(rewards[:5])


def test_the_backend_is_short() -> None:
    assert len(BACKEND.read_text().splitlines()) <= 80
