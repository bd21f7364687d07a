"""What a run needs from outside, looked at before anything starts: cheap, and without torch or Ray."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hwrl.discovery import load_hook
from hwrl.errors import ConfigError, DataError
from hwrl.lora import require_peft
from hwrl.rollout.data import check_prompts
from hwrl.rollout.reward import load_reward
from hwrl.run.config import EMBEDDED, FSDP, Config


def check_inputs(config: Config) -> None:
    """Raise an HwrlError if the model, the reward function or an engine is not there, or a row is no prompt.

    Of the weights only the files' headers are read. Whether they hold every tensor of the model is looked at by the
    trainer: transformers renames and merges some tensors as it loads them, so that names in files tell too little.
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
    damaged = {file.name: why for file in sorted(path.glob("*.safetensors")) if (why := _damage(file))}
    for index in path.glob("*.safetensors.index.json"):
        damaged |= _absent(path, index)
    if damaged:
        raise DataError(
            f"the model in {path} is not whole",
            why="; ".join(f"{name}: {why}" for name, why in damaged.items()),
            fix="download or save the model again",
        )


def _damage(file: Path) -> str | None:
    """Return why ``file`` is no whole .safetensors file, from its header and its size; None if it is."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return "it is no file"
    try:
        with safe_open(file, framework="numpy"):
            return None
    except (OSError, SafetensorError) as exc:
        return str(exc)


def _absent(directory: Path, index: Path) -> dict[str, str]:
    """Return why, for each file that ``index`` names and that is not there; or why the index cannot be read."""
    try:
        places = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        return {name: f"{index.name} names it" for name in sorted(places) if not (directory / name).is_file()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        return {index.name: f"it is no index of weights: {exc!r}"}
