"""What a run needs from outside, looked at before anything starts: cheap, and without torch or Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from hwrl.errors import ConfigError
from hwrl.lora import require_peft
from hwrl.plugins import load_hook
from hwrl.rollout.data import check_prompts
from hwrl.rollout.reward import load_reward
from hwrl.run.config import EMBEDDED, FSDP, Config


def check_inputs(config: Config) -> None:
    """Raise an HwrlError if the model, the reward function or an engine is not there, or a row is no prompt.

    Raises what a plugin's ``hwrl_check_engine`` raises, too, unless the run joins a cluster (``RAY_ADDRESS``).
    Loading the reward function or a plugin runs its module. What needs the tokenizer or the weights is looked at later,
    by the processes that have them.
    """
    _check_model(config)
    check_prompts(config.data.train, key="data.train")
    if config.data.eval is not None:
        check_prompts(config.data.eval, key="data.eval")
    load_reward(config.reward.function)
    if config.model.lora_rank:
        require_peft()
    if config.train.engine != FSDP:
        load_train_engine(config)
        _check_engine(config.train.engine, "train.engine", config.train.engine_options)
    if config.rollout.engine != EMBEDDED:
        load_rollout_engine(config)
        _check_engine(config.rollout.engine, "rollout.engine", config.rollout.engine_options)


def is_local() -> bool:
    """Return whether the run starts a Ray cluster of its own on this machine."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def load_train_engine(config: Config) -> Any:
    """Return the hook that makes the train engine; ``train.engine`` names a plugin."""
    return load_hook(config.train.engine, "hwrl_train_engine", asked_by="train.engine", built_in=[FSDP])


def load_rollout_engine(config: Config) -> Any:
    """Return the hook that makes the rollout engine; ``rollout.engine`` names a plugin."""
    return load_hook(config.rollout.engine, "hwrl_rollout_engine", asked_by="rollout.engine", built_in=[EMBEDDED])


def _check_engine(name: str, asked_by: str, options: Mapping[str, Any]) -> None:
    """Let the plugin look at its options; on a cluster only the machines with the devices need have its framework."""
    if is_local():
        load_hook(name, "hwrl_check_engine", asked_by=asked_by, optional=True)(asked_by=asked_by, options=options)


def _check_model(config: Config) -> None:
    path = config.model.path
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"there is no model in {path}",
            why=f"model.path names it, but {'it has no config.json' if path.is_dir() else 'it is no directory'}",
            fix="name a directory that save_pretrained of a transformers model has written",
        )
