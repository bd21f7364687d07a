"""``hwrl train train.engine=megatron`` as a user runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwrl.run.demo import write_demo
from hwrl.run.report import read_metrics
from tests.support.speed import slow

pytestmark = pytest.mark.long(50)

HWRL = str(Path(sys.executable).with_name("hwrl"))
WORDS = [
    "train.engine=megatron",
    "train.batch_groups=12",
    "optimizer.learning_rate=3e-3",
    "checkpoint.save_every_steps=0",
    "eval.prompts=32",
    "goals={}",
    f"timeouts.heartbeat_s={slow(60)}",
    f"weights.timeout_s={slow(60)}",
]


def run(demo: Path, *words: str) -> str:
    command = [HWRL, "train", str(demo / "config.yaml"), *WORDS, *words]
    ended = subprocess.run(
        command,
        env={**os.environ, "HWRL_BACKEND": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=3000,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    return ended.stdout


STEPS = 30  # of the run that must learn, before it changes to two stages


@pytest.mark.parametrize("steps", [4, pytest.param(STEPS, marks=pytest.mark.extended)])
def test_it_learns_and_goes_on_with_two_stages_that_both_send(tmp_path: Path, steps: int) -> None:
    write_demo(tmp_path, seed=1, prompts=2048)
    run(tmp_path, f"train.steps={steps}")
    stages = ("train.ranks=2", "train.engine_options.pipeline_parallel=2", "weights.senders=2")
    run(tmp_path, "resume=true", f"train.steps={2 * steps}", *stages)
    metrics = read_metrics(tmp_path / "run")
    assert [line["step"] for line in metrics] == list(range(1, 2 * steps + 1))
    assert [line["weights/version"] for line in metrics] == list(range(1, 2 * steps + 1))
    if steps == STEPS:
        rewards = [line["reward/mean"] for line in metrics]
        first, middle, last = (sum(rewards[start : start + 5]) / 5 for start in (0, 30, 55))
        assert first + 0.04 < middle < last
    # What the rollout sampled with is what the trainer computes with: the weights arrived as they are.
    assert max(line["actor/mismatch_kl"] for line in metrics) < 0.1
    assert (tmp_path / "run" / "model" / "config.json").is_file()
