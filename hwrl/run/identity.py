"""Identify the input files of a run by content, so that no process of the run reads a changed file.

The driver hashes the files once. Each process compares its files with these hashes before it builds its parts, and once
more afterwards. Without this, a process that restarts after a death might read other prompts under the same numbers,
another model or another reward function. Paths and times do not count: a file may be copied, moved or touched, and each
machine may have its own copy.

- Prompts: the hashed bytes are the parsed bytes. Of a directory all files count, and of a name on the hub all rows.
- Model directory: all files count but hidden ones and ``.md``, because transformers chooses among the files it finds.
  In ``config.json``, the author's tool and path do not count.
- Weights: the whole file is hashed; a sample would miss a change of a few tensors. The driver always does this, with a
  thread per file and about 2 GB/s per thread. The trainer then finds the file in the page cache. Another process trusts
  a large file with the driver's inode, size and change times. Each write changes them, and only a clock that is set
  back could restore them. If they differ, the process hashes the file itself.
- Functions of the user: their files count, and the modules imported by these files do not.

The configuration itself needs no comparison: the driver passes it to every process by value.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hwrl.errors import ConfigError, DataError, InputChangedError
from hwrl.rollout import HUB, digest_rows
from hwrl.run.config import Config
from hwrl.user_code import function_file

TRAIN, EVAL, REWARD, MODEL = "data.train", "data.eval", "reward.function", "model.path"
CURRICULUM, ORDER, CRITIC = "data.curriculum", "data.order", "critic.path"
LOSS, ADVANTAGE, WORKFLOW = "algorithm.loss", "algorithm.advantage", "rollout.workflow"
TEMPLATE = "data.chat_template"
MODEL_CONFIG = f"{MODEL}/config.json"

Role = Literal["trainer", "rollout"]

_FUNCTIONS: dict[str, Role] = {
    REWARD: "rollout",
    CURRICULUM: "rollout",
    WORKFLOW: "rollout",
    LOSS: "trainer",
    ADVANTAGE: "trainer",
}
"""The keys with import paths of users' functions, and the processes that call these functions."""

_WEIGHTS = (".safetensors", ".bin")
LARGE_NBYTES = 32 << 20
"""A process may trust a file above this size without hashing it."""
_HASH_THREADS = 16
_TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece")
_TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".jinja")


@dataclass(frozen=True)
class InputFile:
    """One file as the driver found it: path, hash, and the file's inode, size and change times."""

    path: Path
    sha256: str
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class RunInputs:
    """The input files of a run, by configuration key. The model's files have keys like ``model.path/<name>``."""

    config: Config
    files: Mapping[str, InputFile]

    def digests(self) -> dict[str, str]:
        """Return the hash of each file, for a checkpoint."""
        return {key: file.sha256 for key, file in self.files.items()} | _order_digest(self.config)

    def read_data(self, key: str) -> bytes | None:
        """Compare the data set ``key``, as :meth:`read` does; return a file's content, and None for other data sets."""
        file = self.files[key]
        if not _is_whole(key, file.path):
            return self.read(key)
        if not _is_same(key, file.path, file, large_nbytes=0):
            raise _changed(key, file.path, "its content has changed")
        return None

    def read(self, key: str) -> bytes:
        """Return the content of the file ``key``. Raises InputChangedError if it has changed since the run began."""
        path = self.files[key].path
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc
        if hashlib.sha256(content).hexdigest() != self.files[key].sha256:
            raise _changed(key, path, "its content has changed")
        return content

    def source(self, key: str) -> bytes | None:
        """Return the source of the user's function ``key``, as :meth:`read` does; None if it has no Python file."""
        file = self.files.get(key)
        return self.read(key) if file is not None and file.path.suffix == ".py" else None

    @contextmanager
    def unchanged(self, role: Role, *, large_nbytes: int = LARGE_NBYTES) -> Iterator[None]:
        """Check the files of ``role`` before and after the block. Prompts are checked by :meth:`read`.

        Raises InputChangedError if a file has changed since the run began. See the module about files above
        ``large_nbytes``.
        """
        self._compare(role, large_nbytes)
        try:
            yield
        finally:
            self._compare(role, large_nbytes)

    def _compare(self, role: Role, large_nbytes: int) -> None:
        expected = {key: file for key, file in self.files.items() if _reads(role, key)}
        found = {key: path for key, path in _find_files(self.config).items() if _reads(role, key)}
        for key, path in found.items():
            if key not in expected:
                raise _changed(key, path, "it did not exist when the run began")
        for key, file in expected.items():
            if key not in found:
                raise _changed(key, file.path, "it is gone")
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            same = list(threads.map(lambda key: _is_same(key, found[key], expected[key], large_nbytes), expected))
        for key, is_same in zip(expected, same, strict=True):
            if not is_same:
                raise _changed(key, found[key], "its content has changed")

    def compare_with_checkpoint(self, extra: Mapping[str, Any]) -> list[str]:
        """Return a sentence for each file that has changed since the checkpoint with ``extra``, and may change.

        Raises ConfigError if the training prompts, the model's configuration or its tokenizer have changed, or the
        weights of a reference model: the run could not continue its training with them. A checkpoint from an older hwrl
        has only the first two.
        """
        saved = extra.get("inputs") or {TRAIN: extra["data"], MODEL_CONFIG: extra["model"]}
        now = self.digests()
        changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
        if of_data := [key for key in changed if _is_of_training_data(key)]:
            raise ConfigError(
                f"{self._where(of_data)} does not hold the checkpoint's training data",
                why=f"changed: {', '.join(of_data)}; the order of the prompts depends on it: some would be lost or "
                "trained twice",
                fix="restore the old file and settings, or start a new run in another dir=…",
            )
        if MODEL_CONFIG in changed:
            raise ConfigError(
                f"the checkpoint is not of the model in {self.config.model.path}",
                why="its config.json has changed since the run began",
                fix="restore the old model, or start a new run in another dir=…",
            )
        if "inputs" not in extra:
            return []
        tokenizer = [key for key in changed if _is_of_tokenizer(key)]
        if tokenizer:
            raise ConfigError(
                f"the tokenizer in {self.config.model.path} is not the checkpoint's",
                why=f"changed since the checkpoint was saved: {', '.join(tokenizer)}; prompts would have other tokens",
                fix="restore the old files, or start a new run in another dir=…",
            )
        weights = [key for key in changed if key.startswith(MODEL) and key.endswith(_WEIGHTS)]
        if weights and self.config.has_reference_copy:
            raise ConfigError(
                f"the weights in {self.config.model.path} are not the checkpoint's reference",
                why=f"changed since the checkpoint was saved: {', '.join(weights)}; the policy is "
                "kept near the model that the run began with",
                fix="restore the old files, or start a new run in another dir=…",
            )
        return [
            f"{key} has changed since the checkpoint was saved; the run continues with the new one" for key in changed
        ]

    def _where(self, keys: Sequence[str]) -> str:
        return ", ".join(str(self.files[key].path) for key in keys if key in self.files) or "data.train"


def identify_inputs(config: Config) -> RunInputs:
    """Hash every input file of a run. Raises DataError for an unreadable file."""
    paths = _find_files(config)
    try:
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            files = dict(zip(paths, threads.map(_identify, paths, paths.values()), strict=True))
    except OSError as exc:
        raise DataError(
            f"{exc.filename} cannot be read",
            why=exc.strerror or str(exc),
            fix="make the file readable; the run compares it again later",
        ) from exc
    return RunInputs(config, files)


def _find_files(config: Config) -> dict[str, Path]:
    """Return the input files that exist now, by key."""
    paths = {data_key(TRAIN, one.name): one.path for one in config.data.train_sets}
    paths |= {data_key(EVAL, one.name): one.path for one in config.data.eval_sets}
    if (template := config.data.chat_template_file) is not None:
        paths[TEMPLATE] = template
    for key in _FUNCTIONS:
        section, name = key.split(".")
        target = str(getattr(getattr(config, section), name))
        if ":" in target and (path := function_file(target)) is not None and path.is_file():  # else it is built in
            paths[key] = path
    files = {key: Path(target.rpartition(":")[0]) for key, target in config.rollout.workflow_functions.items()}
    paths |= {key: path for key, path in files.items() if path.is_file()}
    models = {MODEL: config.model.path}
    if config.algorithm.has_critic and config.critic.path is not None:
        models[CRITIC] = config.critic.path
    for key, model in models.items():
        for path in sorted([*model.glob("*"), *model.glob("additional_chat_templates/*")]):
            if path.is_file() and not path.name.startswith(".") and path.suffix != ".md":
                paths[f"{key}/{path.relative_to(model).as_posix()}"] = path
    return paths


def data_key(key: str, name: str) -> str:
    """Return the key of a data set's file: ``key`` itself for the only one, which has no name."""
    return f"{key}/{name}" if name else key


def _order_digest(config: Config) -> dict[str, str]:
    """Return a hash of all that orders the prompts beside their content; nothing for a set as most runs have it."""
    sets = [(one.name, one.weight, *config.data.keys_of(one)) for one in config.data.train_sets]
    function = (config.data.curriculum or "").rpartition(":")[2]  # its file has a hash of its own, and may move
    if sets == [("", 1.0, "prompt", "answer")] and not function:
        return {}
    return {ORDER: hashlib.sha256(json.dumps([sets, function]).encode()).hexdigest()}


def _is_of_training_data(key: str) -> bool:
    return key in (ORDER, CURRICULUM) or key.partition("/")[0] == TRAIN


def _reads(role: Role, key: str) -> bool:
    """Return whether a process of ``role`` compares the file.

    Replicas get weights from the trainer, and :meth:`RunInputs.read` compares prompts. A trainer reads no prompts, but
    the ledger's state in its checkpoint belongs to them.
    """
    if key in _FUNCTIONS:
        return role == _FUNCTIONS[key]
    if key.startswith(f"{WORKFLOW}_options"):
        return role == "rollout"
    if role == "trainer":
        return key.startswith((TRAIN, MODEL, CRITIC))
    return not key.startswith((TRAIN, EVAL, CRITIC)) and not key.endswith(_WEIGHTS)


def _identify(key: str, path: Path) -> InputFile:
    if _is_whole(key, path):
        return InputFile(path, digest_rows(path), ())
    stamp = _stamp(path)  # before the content, so that a write in between changes the stamp
    return InputFile(path, _digest(key, path), stamp)


def _is_whole(key: str, path: Path) -> bool:
    """Return whether the data set ``key`` is identified by all that belongs to it: it is no file."""
    return key.startswith((TRAIN, EVAL)) and (path.is_dir() or str(path).startswith(HUB))


def _is_same(key: str, path: Path, file: InputFile, large_nbytes: int) -> bool:
    try:
        if _is_whole(key, path):
            return digest_rows(path) == file.sha256
        stamp = _stamp(path)
        return (stamp == file.stamp and path.stat().st_size > large_nbytes) or _digest(key, path) == file.sha256
    except OSError as exc:
        raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc


def _stamp(path: Path) -> tuple[int, ...]:
    status = os.stat(path)  # st_dev is left out: machines number a shared file system differently
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(key: str, path: Path) -> str:
    if key == MODEL_CONFIG:
        return _model_config_digest(path.read_bytes())
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_config_digest(content: bytes) -> str:
    """Return a hash of a model's configuration, without its source path and the version of transformers."""
    try:
        configuration = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):  # the process that loads the model reports it
        return hashlib.sha256(content).hexdigest()
    counted = {
        key: value for key, value in configuration.items() if key not in ("_name_or_path", "transformers_version")
    }
    return hashlib.sha256(json.dumps(counted, sort_keys=True).encode()).hexdigest()


def _is_of_tokenizer(key: str) -> bool:
    name = key.removeprefix(f"{MODEL}/")
    return name != key and (name.startswith(_TOKENIZER_PREFIXES) or name.endswith(_TOKENIZER_SUFFIXES))


def _changed(key: str, path: Path, how: str) -> InputChangedError:
    return InputChangedError(
        f"{path} changed during the run",
        why=f"{key} names it, and {how}; a process that starts now would not continue the same run",
        fix="restore the old file and continue with resume=true, or start a new run in another dir=…",
    )
