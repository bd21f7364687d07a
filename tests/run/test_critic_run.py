"""A run of PPO with a critic, and a divergence from the starting model: it goes on with both engines of one step."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.train_run import Run, trained_prompts

pytestmark = pytest.mark.long(40)

PPO = [
    *("algorithm.advantage=gae", "rollout.n=1", "train.batch_groups=16", "critic.warmup_steps=1"),
    *("critic.learning_rate=1e-3", "algorithm.kl_coeff=0.01", "train.steps=8"),
    *("checkpoint.save_every_steps=3", "eval.every_steps=0", "train.optimizer_offload=true"),
]


def test_policy_and_critic_go_on_together_after_a_trainer_died(start: Callable[..., Run]) -> None:
    run = start(*PPO)
    run.wait_for_step(4)
    assert run.kill("ray::TrainActor") == 1
    assert run.wait() == 0, run.output()
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert sorted(trained_prompts(run)) == list(range(8 * 16))
    assert all("critic/loss" in line and line["timing_s/critic"] > 0 for line in lines)
    assert ["actor/loss" in line for line in lines[:2]] == [False, True]
    assert lines[1]["actor/kl"] == pytest.approx(0, abs=1e-6), "the policy is the reference until its first step"
    assert lines[-1]["actor/kl"] > 0
    resumed = next(line for line in lines if line["step"] == 4)
    assert resumed["critic/learning_rate"] == pytest.approx(4e-4), "the schedule of 10 steps went on"
