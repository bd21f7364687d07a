"""The configuration of a critic and of a reference: where they are refused, and what a resume may change."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.errors import ConfigError
from hwrl.run.config import Config, load_config
from hwrl.run.run_directory import claimed_directory

MINIMAL = """
model: {path: model}
data: {train: train.jsonl}
reward: {function: "rewards.py:score"}
"""


def load(directory: Path, *words: str) -> Config:
    path = directory / "config.yaml"
    path.write_text(f"dir: {directory}/run\n{MINIMAL}")
    return load_config(path, list(words))


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (["critic.lam=0.9"], "critic has settings, but algorithm.advantage=grpo uses no critic"),
        (["algorithm.advantage=gae", "train.engine=megatron"], "algorithm.advantage=gae needs train.engine=fsdp"),
        (["algorithm.kl_coeff=0.1", "train.engine=megatron"], "megatron does not support a reference model"),
        (
            ["algorithm.advantage=gae", "rollout.n=1", "algorithm.filter_groups=true"],
            "algorithm.filter_groups=true would filter every prompt",
        ),
        (["algorithm.advantage=reinforce_plus_plus_baseline", "rollout.n=1"], "rollout.n=1 nothing is learned"),
        (["algorithm.rollout_rs_threshold=1.5"], "has no effect without rollout_rs"),
        (["algorithm.rollout_rs_threshold_lower=0.1"], "has no effect without rollout_rs"),
    ],
)
def test_a_critic_and_a_reference_are_refused_where_nothing_uses_or_has_them(
    tmp_path: Path, words: list[str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match):
        load(tmp_path, *words)


def test_one_response_is_enough_for_a_critic(tmp_path: Path) -> None:
    config = load(tmp_path, "rollout.n=1", "algorithm.advantage=gae", "critic.kl_coeff=0.1")
    assert config.algorithm.has_critic and config.has_reference_copy
    assert not load(tmp_path).has_reference_copy


@pytest.mark.parametrize("advantage", ["reinforce_plus_plus", "advantages.py:of_batch"])
def test_one_response_is_enough_without_a_baseline_of_the_group(tmp_path: Path, advantage: str) -> None:
    (tmp_path / "advantages.py").write_text("def of_batch(groups): ...\n")
    assert load(tmp_path, "rollout.n=1", f"algorithm.advantage={advantage}").rollout.n == 1


def test_a_resume_may_change_its_advantages_but_not_to_a_critic(tmp_path: Path) -> None:
    with claimed_directory(load(tmp_path)):
        (tmp_path / "run" / "metrics.jsonl").write_text("{}\n")
    with claimed_directory(load(tmp_path, "resume=true", "algorithm.advantage=rloo")):
        pass
    with (
        pytest.raises(ConfigError, match=r"with a different algorithm\.advantage\n"),
        claimed_directory(load(tmp_path, "resume=true", "algorithm.advantage=gae")),
    ):
        pass
