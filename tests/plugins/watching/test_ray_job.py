"""``ray job submit``: Ray keeps the driver of a run on the cluster, and shows its output."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support.host_network import RAY, why_unavailable
from tests.support.host_run import ray_hosts

pytest.importorskip("aiohttp", reason="a cluster takes jobs with ray[default] only")


@pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
def test_a_submitted_run_learns_on_two_hosts_and_shows_its_steps() -> None:
    with ray_hosts(count=2, cpus=1, prompts=64, dashboard=True) as (network, work):
        hwrl = [str(Path(sys.executable).with_name("hwrl")), "train", str(work / "config.yaml")]
        words = ["goals={}", "train.steps=2", "train.batch_groups=2", "rollout.n=2", "eval.every_steps=0"]
        submit = [*RAY, "job", "submit", "--address=http://127.0.0.1:8265", "--"]
        output = network.hosts[0].run(
            *submit, *hwrl, *words, "data.eval=null", timeout_s=1800.0, env=network.environment
        )
        assert "weights travel by device" in output and "succeeded" in output
        assert (work / "run" / "model" / "model.safetensors").is_file()
