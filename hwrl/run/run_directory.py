"""Claim a run directory: lock it, check that this run may use it, and write the run's configuration to it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from hwrl.checkpoint import DirectoryLock, DurableFS, find_checkpoints, read_extra
from hwrl.errors import CheckpointCorruptError, ConfigError, RunDirectoryError
from hwrl.files import make_directory, open_to_read, read_file
from hwrl.run.config import RUN_CONFIG, RUN_HEADER, Config, dump_run_config
from hwrl.run.config.yaml_reader import MAX_NBYTES, parse_yaml
from hwrl.run.report import METRICS, MODEL_DIRECTORY, PROMPTS
from hwrl.run.scaling import SCALE

_FILES_OF_A_RUN = (RUN_CONFIG, METRICS, PROMPTS, MODEL_DIRECTORY)

_BATCH, _TRIGGER = "train.batch_groups", "async_training.trigger_parameter_sync_step"

FIXED_KEYS = (
    "seed",
    "model.lora_rank",
    "model.lora_alpha",
    "model.target_modules",
    "rollout.n",
    _BATCH,
    _TRIGGER,
)
"""Keys whose value must not change when a run resumes: the ledger's counts of prompts and versions depend on them.

The model and the training data must not change either. Checkpoints identify them by content, so their paths may change.
"""

_ADVANTAGE = "algorithm.advantage"
"""May change when a run resumes, but not between ``gae`` and the others: only checkpoints of ``gae`` hold a critic."""


@contextmanager
def claimed_directory(config: Config) -> Iterator[None]:
    """Lock the run directory during the block, and write the resolved configuration to it.

    Raises ConfigError if the directory holds another run or cannot be used. Raises CheckpointError, with the owner's
    name, if a run in another process uses it. If the claim fails, the files in the directory stay as they were. An
    error in the block changes nothing back. Removes a request of ``hwrl scale`` to an earlier run.
    """
    with ExitStack() as stack:
        try:
            make_directory(config.dir, mode=0o700)  # prompts, answers and weights are nobody else's
            stack.callback(DirectoryLock(config.dir).close)
            _write_config(config)
            (config.dir / SCALE).unlink(missing_ok=True)  # a request to an earlier run
        except OSError as exc:
            raise ConfigError(
                f"the run directory {config.dir} cannot be used",
                why=str(exc),
                fix="choose a writable directory with dir=…",
            ) from exc
        yield


def _write_config(config: Config) -> None:
    path = config.dir / RUN_CONFIG
    before = read_file(path, max_nbytes=MAX_NBYTES) if os.path.lexists(path) else None
    has_checkpoints = any(config.dir.glob("checkpoints/global_step_*"))
    if before is None or not before.startswith(RUN_HEADER):
        _refuse_to_overwrite(config, [RUN_CONFIG] if has_checkpoints else _FILES_OF_A_RUN)
    if has_checkpoints or _has_lines(config.dir / METRICS):
        _check_same_run(config, before)
    DurableFS().replace_file(path, dump_run_config(config))  # atomically: hwrl would not recognise half a file


def record_replicas(config: Config, replicas: int) -> None:
    """Write the new number of replicas to the configuration in the run directory, so that a resumed run starts with it.

    Raises RunDirectoryError if the file cannot be written.
    """
    minimum = config.rollout.min_replicas
    numbers = {"replicas": replicas, "min_replicas": None if minimum is None else min(minimum, replicas)}
    changed = config.model_copy(update={"rollout": config.rollout.model_copy(update=numbers)})
    try:
        DurableFS().replace_file(config.dir / RUN_CONFIG, dump_run_config(changed))
    except OSError as exc:
        raise RunDirectoryError(
            f"{config.dir / RUN_CONFIG} cannot be written",
            why=str(exc),
            fix="repair the cause in the run directory; this run has the new replicas, a resumed run would not",
        ) from exc


def _has_lines(path: Path) -> bool:
    if not os.path.lexists(path):
        return False
    with open_to_read(path) as file:
        return file.readline(MAX_NBYTES).endswith(b"\n")


def _refuse_to_overwrite(config: Config, names: Sequence[str]) -> None:
    """Raise ConfigError if the directory has one of the files ``names``: they do not come from a run of hwrl."""
    existing = [name for name in names if (config.dir / name).exists()]
    if existing:
        raise ConfigError(
            f"the run would overwrite {', '.join(existing)} in {config.dir}",
            why=f"hwrl did not write it: no {RUN_CONFIG} there begins with {RUN_HEADER.decode().strip()!r}",
            fix="choose another dir=…, or rename the files; if they belong to a run, put that line back",
        )


def _check_same_run(config: Config, saved: bytes | None) -> None:
    """Raise ConfigError unless ``config`` continues the run in the directory. ``saved`` is that run's configuration."""
    if not config.resume:
        raise ConfigError(
            f"{config.dir} already holds a run",
            why="its metrics and checkpoints would be mixed with those of the new run",
            fix="add resume=true to continue it, choose another dir=…, or delete the directory",
        )
    now, before = config.model_dump(mode="json"), _saved_values(config, saved)
    changed = [key for key in FIXED_KEYS if key in before and _value_at(now, key) != before[key]]
    advantage = before.get(_ADVANTAGE)
    if advantage is not None and (_value_at(now, _ADVANTAGE) == "gae") != (advantage == "gae"):
        changed.append(_ADVANTAGE)
    if changed:
        raise ConfigError(
            f"cannot resume {config.dir} with a different {', '.join(changed)}",
            why="; ".join(f"{key} was {before[key]!r} and is {_value_at(now, key)!r}" for key in changed),
            fix="resume with the old values, or start a new run in another dir=…",
        )


def _saved_values(config: Config, saved: bytes | None) -> dict[str, Any]:
    """Return what is known of the run's fixed keys: those in ``saved``, and those by which its checkpoint counts.

    The checkpoint decides, because the configuration in the run directory may have been deleted or edited.
    """
    tree = None if saved is None else _parse_saved(config, saved)
    written = {} if saved is None else {key: _value_at(tree, key) for key in (*FIXED_KEYS, _ADVANTAGE)}
    return written | _counted_values(config)


def _counted_values(config: Config) -> dict[str, int]:
    """Return the fixed keys by which the ledger in the newest checkpoint has counted; {} for one of an earlier hwrl."""
    directory = config.dir / "checkpoints"
    for info in reversed(find_checkpoints(directory)[0] if directory.is_dir() else []):
        with suppress(CheckpointCorruptError):
            ledger = read_extra(info)[0].get("ledger")
            return _counted_by(ledger, info.step) if isinstance(ledger, dict) else {}
    return {}


def _counted_by(ledger: dict[str, Any], step: int) -> dict[str, int]:
    trained, of_version = ledger.get("trained"), ledger.get("groups_per_version")
    if not (isinstance(trained, int) and isinstance(of_version, int) and step and trained) or trained % step:
        return {}
    batch = trained // step
    if of_version % batch:  # an earlier hwrl went on with another batch: the mean is none that was configured
        return {}
    return {_BATCH: batch, _TRIGGER: of_version // batch}


def _parse_saved(config: Config, saved: bytes) -> Any:
    try:
        return parse_yaml(saved.decode())
    except ValueError as exc:  # also of a text that is not UTF-8
        raise ConfigError(
            f"{config.dir / RUN_CONFIG} is damaged, so the configuration of the run there is unknown",
            why=str(exc),
            fix="restore the file; or, if there are checkpoints, delete it and resume with a configuration of your own "
            f"that has the run's {', '.join(FIXED_KEYS)} and {_ADVANTAGE}",
        ) from exc


def _value_at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return tree
