"""``hwrl train`` on devices unknown to Ray: each process gets its own, or shares one as the run logs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics
from tests.support.backends import runs_here
from tests.support.train_run import late_reward

pytestmark = pytest.mark.long(25)

HWRL = str(Path(sys.executable).with_name("hwrl"))
SMALL = ["train.steps=3", "train.batch_groups=4", "rollout.n=4", "eval.prompts=8", "goals={}"]

STEPS = 8


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with the backend of ``numbered.py``, as after an installation."""
    (tmp_path / "numbered.py").write_text((Path(__file__).parents[2] / "support" / "numbered.py").read_text())
    metadata = tmp_path / "numbered-0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: numbered\nVersion: 0.1\n")
    (metadata / "entry_points.txt").write_text("[hwrl.backends]\nnumbered = numbered\n")
    return tmp_path


def train(
    site: Path, *words: str, devices: int, backend: str = "numbered", **variables: str
) -> subprocess.CompletedProcess[str]:
    config = str(write_demo(site / "demo", seed=1, prompts=64))
    path = os.pathsep.join([str(site), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    env = {**os.environ, "PYTHONPATH": path, "HWRL_BACKEND": backend, "NUMBERED_DEVICES": str(devices)}
    env |= dict.fromkeys(("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"), ",".join(map(str, range(devices))))
    env |= variables
    return subprocess.run(
        [HWRL, "train", config, *SMALL, *words], env=env, text=True, capture_output=True, timeout=1500, check=False
    )


# ci/npu runs this on the simulated NPU; on a machine with two GPUs, it also runs on them.
@pytest.mark.parametrize("backend", ["numbered", *(name for name in ("cuda", "npu") if runs_here(name))])
def test_replicas_sleep_on_the_trainers_devices_and_open_its_memory(site: Path, backend: str) -> None:
    """Each replica gets every version, on the sender's device and on the other, and its tokens are the model's.

    A reward takes longer than a replica waits before it sleeps, so each one sleeps in most steps on any machine.
    """
    colocated = ["train.ranks=2", "rollout.replicas=2", "rollout.free_cache_engine=true", "train.param_offload=true"]
    rest = ["train.optimizer_offload=true", "async_training.staleness_threshold=0", f"train.steps={STEPS}"]
    rest += [late_reward(site), "train.batch_groups=2", "rollout.n=2"]
    ended = train(site, *colocated, *rest, devices=2, backend=backend)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (
        "trainer rank 0 on device 0, trainer rank 1 on device 1, replica-0 on device 0, replica-1 on device 1; too few"
        " devices (2), so replicas share the trainer's devices; weights travel by ipc" in " ".join(ended.stdout.split())
    )
    assert not re.search("replica.* ended", ended.stdout + ended.stderr)
    metrics = read_metrics(site / "demo" / "run")
    assert [line["sync/receivers"] for line in metrics] == [2.0] * STEPS, "a replica missed a version"
    assert max(line["actor/mismatch_kl"] for line in metrics) < 1e-3
    assert sum(line["rollout/sleeps"] for line in metrics) > STEPS // 2, [line["rollout/sleeps"] for line in metrics]


@pytest.mark.extended  # test_placement.py checks the numbers and the choice; above, weights travel by ipc
def test_each_process_takes_the_device_that_it_is_told_by_number_without_collectives(site: Path) -> None:
    ended = train(site, devices=2, NUMBERED_MAP="index", NUMBERED_MUTE="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = " ".join(ended.stdout.split())
    assert "trainer rank 0 on device 0, replica-0 on device 1; each process has its own" in said
    assert (
        "weights travel by ipc: the device has no collectives (nobody wrote the library)" in said or "by host" in said
    )


@pytest.mark.extended  # test_placement.py checks both refusals
@pytest.mark.parametrize(
    ("fault", "says"),
    [
        (
            {"NUMBERED_MAP": "index", "NUMBERED_STUCK": "1"},
            r"(trainer rank 0|replica-0) and (trainer rank 0|replica-0) are on the same device",
        ),
        ({"NUMBERED_MAP": "deaf"}, r"NUMBERED_VISIBLE does not hide the other devices"),
    ],
    ids=["set_device has no effect", "nothing reads the variable"],
)
def test_processes_that_share_without_having_been_told_are_refused(
    site: Path, fault: dict[str, str], says: str
) -> None:
    ended = train(site, devices=2, **fault)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert re.search(says, ended.stderr), ended.stderr
    assert not read_metrics(site / "demo" / "run")
