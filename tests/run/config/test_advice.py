"""What the configuration answers to keys and values of other programs, and to paths in the home directory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl.errors import ConfigError
from hwrl.run.config import Config, dump_config, load_config
from hwrl.run.config.explain import RENAMED, SAME_AS, all_keys
from tests.support.run_config import load, write_config


@pytest.mark.parametrize(
    ("word", "advice"),
    [
        ("lr=1", r"lr: there is no such key, did you mean optimizer\.learning_rate\?"),
        ("learning_rate=1", r"did you mean optimizer\.learning_rate or critic\.learning_rate\?"),
        ("train.lr=1", r"did you mean optimizer\.learning_rate\?"),
        ("steps=5", r"did you mean train\.steps\?\n"),
        ("rollout.steps=1", r"did you mean train\.steps\?\n"),
        ("train.stps=1", r"did you mean train\.steps\?\n"),
        ("train.learning_rate=1", r"did you mean optimizer\.learning_rate or critic\.learning_rate\?\n"),
        ("async_training.stalenes_threshold=2", r"did you mean async_training\.staleness_threshold\?"),
        ("train.partial_rollout=true", r"did you mean async_training\.partial_rollout\?"),
        ("reward.threads=2", r"reward\.threads: there is no such key, did you mean reward\.workers"),
        ("data.train=[{path: a.jsonl, wieght: 2}]", r"data\.train\.0\.wieght: there is no such key"),
        ("train.num_generations=8", r"did you mean rollout\.n\?"),
        ("algorithm.kl_coef=0", r"did you mean algorithm\.kl_coeff\?"),
        ("critic.kl_coef=0", r"did you mean critic\.kl_coeff\?"),
        ("critic.lr=1", r"did you mean critic\.learning_rate\?"),
        ("critic_lr=1", r"did you mean critic\.learning_rate\?"),
        ("checkpoint.interval=1", r"did you mean checkpoint\.save_every_steps\?"),
        ("eval.interval=1", r"did you mean eval\.every_steps\?"),
        ("TRAIN.STEPS=1", r"did you mean train\.steps\?"),
        ("report.trackers=wandb", r"should be a list, like \[wandb\]"),
        ("beta=0", r"did you mean algorithm\.kl_coeff\?"),
        ("lora.rank=8", r"did you mean model\.lora_rank\?"),
        ("model.name_or_path=x", r"did you mean model\.path\?"),
        ("model.name=x", r"did you mean model\.path\?"),
        ("optimizer.name=adam", r"optimizer\.name: there is no such key\n"),
        ("optimizer.type=adam", r"optimizer\.type: there is no such key\n"),
        ("output_dir=x", r"did you mean dir\?"),
        ("reward.path=x", r"did you mean reward\.function\?"),
        ("custom_reward_function.path=x", r"did you mean reward\.function\?"),
        ("data.path=x", r"did you mean data\.train\?"),
        ("rollout.backend=x", r"did you mean rollout\.engine\?"),
        ("rollout.name=x", r"did you mean rollout\.engine\?"),
        ("train.backend=x", r"did you mean train\.engine\?"),
        ("weights.transport=x", r"did you mean weights\.bypass_cpu\?"),
        ("eval.every=5", r"did you mean eval\.every_steps\?"),
        ("eval.freq=5", r"did you mean eval\.every_steps\?"),
        ("checkpoint.freq=5", r"did you mean checkpoint\.save_every_steps\?"),
        ("random_seed=1", r"did you mean seed\?"),
        ("scale_rewards=false", r"did you mean algorithm\.advantage\?"),
        ("rollout.gpu_memory_utilization=0.5", r"did you mean rollout\.engine_options\.gpu_memory_utilization\?"),
        ("rollout.quantization=x", r"did you mean rollout\.engine_options\.quantization, for an engine of a plugin\?"),
        (
            "actor.optim.lr=1",
            r"actor: there is no such key, for actor\.optim\.lr did you mean optimizer\.learning_rate",
        ),
        (
            "algorithm.loss=grpo",
            r"grpo is an advantage: set algorithm\.advantage=grpo; its loss is usually loss=ppo_cl",
        ),
        ("algorithm.advantage=gspo", r"gspo is a loss: set algorithm\.loss=gspo"),
        ("dir=", "dir: Input should be a path, not an empty text"),
        ("weights.senders=x", "why: weights.senders: Input should be 'auto', or Input should be a valid integer"),
        ("data.train=[5]", r"has 1 mistake\n  why: data\.train\.0\.path: Input should be a path"),
    ],
)
def test_a_key_or_value_of_other_programs_is_answered_with_ours(tmp_path: Path, word: str, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice) as caught:
        load(tmp_path, word)
    assert not re.search(r"<class|function-|instance of", caught.value.why), "no word of Python"


def test_every_key_that_is_suggested_exists() -> None:
    keys = set(all_keys(Config))
    assert keys >= {*SAME_AS, *(text.partition(",")[0] for text in RENAMED.values())}
    assert not {name for theirs in SAME_AS.values() for name in theirs} & {key.rpartition(".")[2] for key in keys}


def test_a_path_may_begin_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir("/")
    tree = {
        "dir": "~/runs/x",
        "model": {"path": "~"},
        "data": {"train": {"a": "~/a.jsonl"}, "eval": "~/b.jsonl", "chat_template": "~/t.jinja"},
        "reward": {"function": "~/r.py:f"},
        "rollout": {"workflow": "~/w.py:f", "workflow_options": {"tools": ["~/tools.py:f"]}},
        "critic": {"path": "~/critic"},
        "algorithm": {"advantage": "gae"},
        "report": {"trackers": ["~/t.py:f"], "tracker_options": {"~/t.py:f": {}}},
    }
    path = write_config(tmp_path, tree)
    shown = dump_config(load_config(path))
    assert "~" not in shown and shown.count(f" {tmp_path}/") == 10 and f"path: {tmp_path}\n" in shown
    assert str(load_config(path, ["dir=./~"]).dir) == "/~"
    with pytest.raises(ConfigError, match=r"has no home directory; write \./~"):
        load_config(path, ["dir=~nobody-has-this-name/x"])
    assert main(["train", "~/config.yaml", "--print-config"]) == 0
    assert main(["report", "~/none", "--out=~/page.html"]) == 1
    assert f"hwrl: RunDirectoryError: {tmp_path}/none holds no run" in capsys.readouterr().err
    for option in ("", "~nobody-has-this-name"):
        with pytest.raises(SystemExit, match="2"):
            main(["report", str(tmp_path), f"--out={option}"])
