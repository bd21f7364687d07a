"""Check the inputs of a run before anything starts, cheaply: without torch and Ray.

Some small functions about the run's start are also here: the hooks of the engines' plugins, and whether Ray is local.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from hwrl.discovery import load_hook
from hwrl.errors import ConfigError, DataError
from hwrl.files import read_file
from hwrl.hub import model_directory
from hwrl.lora import require_peft
from hwrl.rollout import DataKeys, RewardFunction, check_prompts, load_reward
from hwrl.run.config import EMBEDDED, FSDP, Config
from hwrl.run.first_import import LIMIT_S, try_in_child
from hwrl.run.report.trackers import make_tracker
from hwrl.run.settings import tokenizer_with
from hwrl.train import CLIPPED_LOSSES
from hwrl.user_code import load_function

_MAX_INDEX_NBYTES, _MAX_TEMPLATE_NBYTES = 1 << 28, 1 << 20


def check_inputs(config: Config) -> None:
    """Raise an HwrlError if the model, a user's function or an engine is missing, or if a data row is not a prompt.

    Reads only the headers of the weight files. The trainer checks later that they hold every tensor of the model:
    transformers renames and merges tensors while loading, so the names in the files are not enough. Checks that need
    the tokenizer also happen later, in the processes.

    Users' code runs for the first time in a child process. Loading a plugin runs its module. A plugin's
    ``hwrl_check_engine`` may raise as well, unless the run joins a cluster (``RAY_ADDRESS``).
    """
    for key, path in config.models.items():
        _check_model(key, model_directory(path))
    _check_template(config.data.chat_template_file)
    columns = try_in_child(_use_functions, config, limit_s=min(LIMIT_S, config.timeouts.start_s))
    for key, sets in (("data.train", config.data.train_sets), ("data.eval", config.data.eval_sets)):
        for data_set in sets:
            check_prompts(data_set.path, key=key, keys=DataKeys(*config.data.keys_of(data_set)), columns=columns)
    if config.model.lora_rank:
        require_peft()
    if config.train.engine != FSDP:
        load_train_engine(config)
        _check_engine(config.train.engine, "train.engine", config.train.engine_options)
    if config.rollout.engine != EMBEDDED:
        load_rollout_engine(config)
        _check_engine(config.rollout.engine, "rollout.engine", config.rollout.engine_options)


def _use_functions(step: Callable[[str], None], config: Config) -> Collection[str]:
    """Load every function of the user, make the trackers and the workflow; return the columns that the reward needs.

    On a cluster no workflow is made, because this machine may lack what it needs.
    """
    columns: Collection[str] = ()
    if config.reward.function is not None:
        step(f"reward.function={config.reward.function}")
        columns = RewardFunction(load_reward(config.reward.function)).columns.required
    functions = {"data.curriculum": config.data.curriculum, "rollout.workflow": config.rollout.workflow}
    functions |= {"algorithm.loss": config.algorithm.loss, "algorithm.advantage": config.algorithm.advantage}
    for key, target in {**functions, **config.rollout.workflow_functions}.items():
        if target is not None and ":" in target:  # else it is built in
            step(f"{key}={target}")
            load_function(target, key=key)
    for name in config.report.trackers:
        step(f"report.trackers={name}")
        make_tracker(config, name)
    if config.rollout.workflow is not None and is_local():
        from hwrl.rollout import load_workflow

        step(f"rollout.workflow={config.rollout.workflow}")
        file = config.data.chat_template_file
        tokenizer = tokenizer_with(config, None if file is None else file.read_text(encoding="utf-8"))
        load_workflow(config.rollout.workflow, config.rollout.workflow_options, tokenizer=tokenizer)
    return columns


def sampling_warning(config: Config) -> str | None:
    """Return a warning for the log if the loss would mistake the effect of sampling filters for a policy change.

    Engines report log-probabilities of the filtered distribution. So even for an unchanged policy, the ratio of trained
    to sampled probability is not 1 but the probability mass that the filters keep. With top-p alone this mass is at
    least ``top_p``; with top-k or min-p it has no lower bound.
    """
    rollout, algorithm = config.rollout, config.algorithm
    filters = {"top_p": rollout.top_p < 1, "top_k": rollout.top_k != -1, "min_p": rollout.min_p > 0}
    if not any(filters.values()):
        return None
    lowest = 0.0 if filters["top_k"] or filters["min_p"] else rollout.top_p
    effects = []
    if algorithm.loss in CLIPPED_LOSSES and lowest < 1 - algorithm.clip_ratio_low:
        effects.append(f"loss={algorithm.loss} clips it below {1 - algorithm.clip_ratio_low:g}")
    if algorithm.rollout_rs in ("token_k1", "seq_mean_k1") and lowest < algorithm.rejection_band[0]:
        effects.append(f"rollout_rs={algorithm.rollout_rs} rejects it below {algorithm.rejection_band[0]:g}")
    if algorithm.rollout_is == "sequence" or algorithm.rollout_rs == "seq_sum_k1":
        effects.append("its product over a long response goes to 0")
    used = ", ".join(f"rollout.{name}={getattr(rollout, name)}" for name, is_used in filters.items() if is_used)
    if not effects:
        return None
    return (
        f"{used}: for a token of the current policy, the ratio of trained to sampled probability is not 1 but the "
        f"probability mass that the filters keep, down to {lowest:g}; {'; '.join(effects)} "
        "(docs/algorithms.md, Filters of sampling)"
    )


def is_local() -> bool:
    """Return whether the run starts its own Ray on this machine. Otherwise it joins the cluster at RAY_ADDRESS."""
    return os.environ.get("RAY_ADDRESS", "") in ("", "local")


def load_train_engine(config: Config) -> Any:
    """Return the hook of the plugin named by ``train.engine``. Calling the hook makes the train engine."""
    return load_hook(config.train.engine, "hwrl_train_engine", asked_by="train.engine", built_in=[FSDP])


def load_rollout_engine(config: Config) -> Any:
    """Return the hook of the plugin named by ``rollout.engine``. Calling the hook makes the rollout engine."""
    return load_hook(config.rollout.engine, "hwrl_rollout_engine", asked_by="rollout.engine", built_in=[EMBEDDED])


def _check_engine(name: str, asked_by: str, options: Mapping[str, Any]) -> None:
    """Let the plugin check its options. Not on a cluster, because this machine may lack the plugin's framework."""
    if is_local():
        load_hook(name, "hwrl_check_engine", asked_by=asked_by, optional=True)(asked_by=asked_by, options=options)


def _check_model(key: str, path: Path) -> None:
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"there is no model in {path}",
            why=f"{key} names it, and {'it has no config.json' if path.is_dir() else 'it is not a directory'}",
            fix=f"set {key} to a directory written by save_pretrained of a transformers model, or to OWNER/NAME of "
            "a model on the hub",
        )
    damaged = {file.name: why for file in sorted(path.glob("*.safetensors")) if (why := _damage(file))}
    for index in path.glob("*.safetensors.index.json"):
        damaged |= _missing(path, index)
    if damaged:
        raise DataError(
            f"the model in {path} is damaged or incomplete",
            why="; ".join(f"{name}: {why}" for name, why in damaged.items()),
            fix="download or save the model again",
        )


def _check_template(file: Path | None) -> None:
    if file is not None and not file.is_file():
        raise ConfigError(
            f"there is no file {file}",
            why="data.chat_template names it: a text without '{' is taken for a file name, not for a template",
            fix="correct the path, or set data.chat_template to the text of the template",
        )
    try:
        b"" if file is None else read_file(file, max_nbytes=_MAX_TEMPLATE_NBYTES, follow_links=True).decode()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{file} is no chat template", why=f"data.chat_template names it, and {exc}", fix="write it in UTF-8"
        ) from exc


def _damage(file: Path) -> str | None:
    """Return the damage of the .safetensors ``file``, judged by its header and its size; None if it is intact."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return "it is not a file"
    try:
        with safe_open(file, framework="numpy"):
            return None
    except (OSError, SafetensorError) as exc:
        return str(exc)


def _missing(directory: Path, index: Path) -> dict[str, str]:
    """Return the files that ``index`` names and ``directory`` lacks, with reasons; the index itself if unreadable."""
    try:
        names = set(
            json.loads(read_file(index, max_nbytes=_MAX_INDEX_NBYTES, follow_links=True))["weight_map"].values()
        )
        return {name: f"{index.name} names it" for name in sorted(names) if not (directory / name).is_file()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        return {index.name: f"it is not an index of weights: {exc!r}"}
