"""What a run reads from the disk: identified once by the driver, and compared by each process with what it reads.

Without this, a process that starts again after a death would read whatever is there by then: other prompts under the
same numbers, another model, another reward. Files are identified by content, so a file may be copied, moved or touched,
and machines may have copies of their own:

- Prompts are hashed as a whole, and the bytes that are hashed are the bytes that are parsed.
- Of the model directory every file counts that is not hidden and does not end in ``.md``: transformers chooses among
  the files that it finds. Of ``config.json`` it does not count what wrote it, and where it came from.
- Weights are hashed as a whole: a sample would miss a change of a few tensors. Only the driver always does it, once,
  with a thread for each file, about 2 GB/s in each; then the trainer finds the file in the page cache. Another process
  trusts a large file if inode, size and both times of change are those that the driver saw. A write changes them, and
  only a clock that is set back can restore them. If they differ, the process hashes the file itself.
- Of a reward function the file counts that defines it, but not the modules that this file imports.

A process compares before it builds its parts and again afterwards, so it finds a change in between, too. The
configuration needs no comparison: every process has it from the driver, by value, and none reads its file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hwrl.errors import ConfigError, DataError, InputChangedError
from hwrl.run.config import Config

TRAIN, EVAL, REWARD, MODEL = "data.train", "data.eval", "reward.function", "model.path"
MODEL_CONFIG = f"{MODEL}/config.json"

Role = Literal["trainer", "rollout"]

_WEIGHTS = (".safetensors", ".bin")
_LARGE_NBYTES = 32 << 20
_HASH_THREADS = 16
_OF_TOKENIZER = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece")
_OF_TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".jinja")


@dataclass(frozen=True)
class InputFile:
    """One file as the driver found it: where, its hash, and the inode, size and times of change that it had."""

    path: Path
    sha256: str
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class RunInputs:
    """The files that a run reads, by configuration key; those of the model as ``model.path/<name>``."""

    config: Config
    files: Mapping[str, InputFile]

    def digests(self) -> dict[str, str]:
        """Return the hash of each file, for a checkpoint."""
        return {key: file.sha256 for key, file in self.files.items()}

    def read(self, key: str) -> bytes:
        """Return the content of ``key``'s file; raise InputChangedError if it is not what the run began with."""
        path = self.files[key].path
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc
        if hashlib.sha256(content).hexdigest() != self.files[key].sha256:
            raise _changed(key, path, "it has another content now")
        return content

    @contextmanager
    def unchanged(self, role: Role) -> Iterator[None]:
        """Let a process of ``role`` read its files, except prompts, which it gets from :meth:`read`.

        Raises InputChangedError if a file is not what the run began with before the block, or after it.
        """
        self._compare(role)
        try:
            yield
        finally:
            self._compare(role)

    def _compare(self, role: Role) -> None:
        expected = {key: file for key, file in self.files.items() if _reads(role, key)}
        there = {key: path for key, path in _places(self.config).items() if _reads(role, key)}
        for key, path in there.items():
            if key not in expected:
                raise _changed(key, path, "it was not there when the run began")
        for key, file in expected.items():
            if key not in there:
                raise _changed(key, file.path, "it is gone")
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            same = list(threads.map(lambda key: _is_same(key, there[key], expected[key]), expected))
        for key, is_same in zip(expected, same, strict=True):
            if not is_same:
                raise _changed(key, there[key], "it has another content now")

    def compare_with_checkpoint(self, extra: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each file that changed since a checkpoint with ``extra`` was saved, if it may change.

        Raises ConfigError for the training prompts, the model's configuration and its tokenizer: what was trained and
        what comes next would not belong together. A checkpoint of an older hwrl names the first two only.
        """
        saved = extra.get("inputs") or {TRAIN: extra["data"], MODEL_CONFIG: extra["model"]}
        now = self.digests()
        changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
        if TRAIN in changed:
            raise ConfigError(
                f"{self.config.data.train} does not hold the checkpoint's training data",
                why="its hash is another, and the order of the prompts depends on it: some would be lost or come twice",
                fix="put the old file back, or begin a new run in another dir=…",
            )
        if MODEL_CONFIG in changed:
            raise ConfigError(
                f"the checkpoint is not of the model in {self.config.model.path}",
                why="the configuration there, config.json, is another than when the run began",
                fix="put the old model back, or begin a new run in another dir=…",
            )
        if "inputs" not in extra:
            return []
        tokenizer = [key for key in changed if _is_of_tokenizer(key)]
        if tokenizer:
            raise ConfigError(
                f"the tokenizer in {self.config.model.path} is not the checkpoint's",
                why=f"changed since the checkpoint was saved: {', '.join(tokenizer)}; prompts would be other tokens",
                fix="put the old files back, or begin a new run in another dir=…",
            )
        return [
            f"{key} has changed since the checkpoint was saved; the run goes on with what is there" for key in changed
        ]


def identify_inputs(config: Config) -> RunInputs:
    """Read every file that a run of ``config`` reads. Raises DataError for one that cannot be read."""
    places = _places(config)
    try:
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            files = dict(zip(places, threads.map(_identify, places, places.values()), strict=True))
    except OSError as exc:
        raise DataError(
            f"{exc.filename} cannot be read",
            why=exc.strerror or str(exc),
            fix="make the file readable; the run must know it again later",
        ) from exc
    return RunInputs(config, files)


def _places(config: Config) -> dict[str, Path]:
    """Return the files that there are now."""
    places = {TRAIN: config.data.train}
    if config.data.eval is not None:
        places[EVAL] = config.data.eval
    if (reward := _reward_file(config.reward.function)) is not None and reward.is_file():
        places[REWARD] = reward
    model = config.model.path
    for path in sorted([*model.glob("*"), *model.glob("additional_chat_templates/*")]):
        if path.is_file() and not path.name.startswith(".") and path.suffix != ".md":
            places[f"{MODEL}/{path.relative_to(model).as_posix()}"] = path
    return places


def _reward_file(target: str) -> Path | None:
    """Return the file that defines the reward function; None for what is no Python file, or is not there."""
    place = target.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place)
    try:
        spec = importlib.util.find_spec(place)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin is not None else None


def _reads(role: Role, key: str) -> bool:
    """Return whether a process compares the file. Replicas get weights from the trainer, and prompts elsewhere.

    A trainer reads no prompts; but the accounts that it goes back to belong to them.
    """
    if role == "trainer":
        return key == TRAIN or key.startswith(MODEL)
    return key not in (TRAIN, EVAL) and not key.endswith(_WEIGHTS)


def _identify(key: str, path: Path) -> InputFile:
    stamp = _stamp(path)  # before the content: what is written meanwhile changes it
    return InputFile(path, _digest(key, path), stamp)


def _is_same(key: str, path: Path, file: InputFile) -> bool:
    try:
        stamp = _stamp(path)
        return (stamp == file.stamp and path.stat().st_size > _LARGE_NBYTES) or _digest(key, path) == file.sha256
    except OSError as exc:
        raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc


def _stamp(path: Path) -> tuple[int, ...]:
    status = os.stat(path)  # without the device: machines number a shared file system differently
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(key: str, path: Path) -> str:
    if key == MODEL_CONFIG:
        return _configuration_digest(path.read_bytes())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _configuration_digest(content: bytes) -> str:
    """Return a hash of a model's configuration, but for where it came from and what wrote it."""
    try:
        configuration = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):  # the process that loads the model says so
        return hashlib.sha256(content).hexdigest()
    told = {key: value for key, value in configuration.items() if key not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _is_of_tokenizer(key: str) -> bool:
    name = key.removeprefix(f"{MODEL}/")
    return name != key and (name.startswith(_OF_TOKENIZER) or name.endswith(_OF_TOKENIZER_SUFFIXES))


def _changed(key: str, path: Path, how: str) -> InputChangedError:
    return InputChangedError(
        f"{path} changed while the run was going on",
        why=f"{key} names it, and {how}; with it, a process that starts now would not continue the same run",
        fix="put the old file back and continue with resume=true, or begin a new run in another dir=…",
    )
