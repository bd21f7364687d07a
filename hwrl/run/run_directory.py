"""Claim a run directory: lock it, check that this run may use it, and write the configuration into it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml

from hwrl.checkpoint import DirectoryLock, DurableFS
from hwrl.errors import ConfigError, RunDirectoryError
from hwrl.run.config import RUN_CONFIG, RUN_HEADER, Config, dump_run_config
from hwrl.run.report import CURVE, METRICS, MODEL_DIRECTORY, PROMPTS

_FILES_OF_A_RUN = (RUN_CONFIG, METRICS, PROMPTS, CURVE, MODEL_DIRECTORY)

FIXED_KEYS = (
    "seed",
    "model.lora_rank",
    "model.lora_alpha",
    "model.target_modules",
    "rollout.n",
    "train.batch_groups",
    "async_training.trigger_parameter_sync_step",
)
"""Keys with a fixed value in a resumed run: the ledger's counts of prompts and versions depend on them.

The model and the training data may not change either. A checkpoint identifies them by content, so their paths may.
"""

_ADVANTAGE = "algorithm.advantage"
"""May change in a resumed run, but not to a critic or from one: checkpoints have it or not."""


@contextmanager
def claimed_directory(config: Config) -> Iterator[None]:
    """Lock the run directory for the block and write the resolved configuration into it.

    Raises ConfigError if the directory holds another run or cannot be used. Raises CheckpointError, with the owner's
    name, if a run in another process uses it. An error leaves the directory as it was.
    """
    with ExitStack() as stack:
        _claim(config, stack)
        yield


def _claim(config: Config, stack: ExitStack) -> None:
    try:
        config.dir.mkdir(parents=True, exist_ok=True)
        stack.callback(DirectoryLock(config.dir).close)
        _write_config(config)
    except OSError as exc:
        raise ConfigError(
            f"the run directory {config.dir} cannot be used",
            why=str(exc),
            fix="choose a writable directory with dir=…",
        ) from exc


def _write_config(config: Config) -> None:
    path = config.dir / RUN_CONFIG
    before = path.read_bytes() if path.exists() else None
    has_checkpoints = any(config.dir.glob("checkpoints/global_step_*"))
    if before is None or not before.startswith(RUN_HEADER):
        _refuse_to_overwrite(config, [RUN_CONFIG] if has_checkpoints else _FILES_OF_A_RUN)
    if has_checkpoints or _has_lines(config.dir / METRICS):
        _check_same_run(config, before)
    DurableFS().replace_file(path, dump_run_config(config))  # hwrl would not recognise half a file as its own


def record_replicas(config: Config, replicas: int) -> None:
    """Write the new number of replicas into the run's configuration: a resume from this file begins with it.

    Raises RunDirectoryError if that fails.
    """
    least = config.rollout.min_replicas
    numbers = {"replicas": replicas, "min_replicas": None if least is None else min(least, replicas)}
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=numbers)})
    try:
        DurableFS().replace_file(config.dir / RUN_CONFIG, dump_run_config(changed))
    except OSError as exc:
        raise RunDirectoryError(
            f"{config.dir / RUN_CONFIG} cannot be written",
            why=str(exc),
            fix="repair the cause in the run directory; the replicas have changed, and a resume would not know it",
        ) from exc


def _has_lines(path: Path) -> bool:
    return path.exists() and b"\n" in path.read_bytes()


def _refuse_to_overwrite(config: Config, names: Sequence[str]) -> None:
    """Raise ConfigError if the directory has one of these files and no configuration of a run explains it."""
    found = [name for name in names if (config.dir / name).exists()]
    if found:
        raise ConfigError(
            f"the run would overwrite {', '.join(found)} in {config.dir}",
            why=f"hwrl did not write it: no {RUN_CONFIG} there begins with {RUN_HEADER.decode().strip()!r}",
            fix="choose another dir=…, or rename the files; if they belong to a run, put that line back",
        )


def _check_same_run(config: Config, saved: bytes | None) -> None:
    """Raise ConfigError unless ``config`` continues the run in the directory. ``saved`` is that run's configuration."""
    if not config.resume:
        raise ConfigError(
            f"{config.dir} already holds a run",
            why="its metrics and checkpoints would be mixed with the new run's",
            fix="add resume=true to continue it, choose another dir=…, or delete the directory",
        )
    if saved is None:
        return
    now, before = config.model_dump(mode="json"), _parse_saved(config, saved)
    changed = [key for key in FIXED_KEYS if _value_at(now, key) != _value_at(before, key)]
    if (_value_at(now, _ADVANTAGE) == "gae") != (_value_at(before, _ADVANTAGE) == "gae"):
        changed.append(_ADVANTAGE)
    if changed:
        raise ConfigError(
            f"cannot resume {config.dir} with another {', '.join(changed)}",
            why="; ".join(f"{key} was {_value_at(before, key)!r} and is {_value_at(now, key)!r}" for key in changed),
            fix="resume with the old values, or start a new run in another dir=…",
        )


def _parse_saved(config: Config, saved: bytes) -> Any:
    try:
        return yaml.safe_load(saved)
    except (yaml.YAMLError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"{config.dir / RUN_CONFIG} is damaged: the configuration of the run there is unknown",
            why=str(exc),
            fix="restore the file; or, if there are checkpoints, delete it and resume with your configuration",
        ) from exc


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return tree
