"""Hash the input files of a run, so that no process of the run reads a file that has changed since the start.

The driver hashes the files once. Each process compares its files with these hashes before it builds its parts, and
again afterwards. Without the check, a process that restarts after a death might read other prompts under the same
numbers, another model or another reward function. Paths and file times are ignored: a file may be copied, moved or
touched, and each machine may have its own copy.

- Prompts: a process parses the same bytes that it has hashed. For a directory of the library ``datasets``, all files
  are hashed. For a data set on the hub, all rows are hashed.
- Model directory: all files are hashed except hidden files and ``.md`` files, because transformers chooses among the
  files that it finds. In ``config.json``, the version of transformers and the model's original path are ignored.
- Weights: whole files are hashed, because a sample could miss a change of a few tensors. The driver always does so, at
  about 2 GB/s in one thread per file, and the trainer then finds the files in the page cache. Other processes skip the
  hash of a large file if its inode, size and change times are the driver's. Each write changes these values, and only a
  clock that is set back could restore them. If they differ, the process computes the hash.
- Users' functions: their files are hashed. Modules that these files import are not.

The configuration itself needs no check: the driver passes it to every process by value.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hwrl.errors import ConfigError, DataError, InputChangedError
from hwrl.files import open_to_read
from hwrl.hub import is_on_hub, model_directory
from hwrl.rollout import digest_rows
from hwrl.run.config import Config
from hwrl.user_code import function_file

TRAIN, EVAL, REWARD, MODEL = "data.train", "data.eval", "reward.function", "model.path"
CURRICULUM, ORDER, REFERENCE = "data.curriculum", "data.order", "algorithm.reference"
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
"""The configuration keys that name users' functions, each with the kind of process that calls the function."""

_OF_TRAINER = ("critic.path", REFERENCE)
"""The models that only trainers read."""
_WEIGHTS = (".safetensors", ".bin")
LARGE_NBYTES = 32 << 20
"""A process may accept a larger file without hashing it, if its inode, size and change times are the driver's."""
_HASH_THREADS = 16
_TOKENIZER_PREFIXES = ("tokenizer", "vocab", "merges", "special_tokens", "added_tokens", "chat_template", "spiece")
_TOKENIZER_SUFFIXES = (".model", ".tiktoken", ".jinja")


@dataclass(frozen=True)
class InputFile:
    """One file when the driver hashed it: path and hash, and the ``stamp``: inode, size and change times."""

    path: Path
    sha256: str
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class RunInputs:
    """The input files of a run, by configuration key. The model's files have keys like ``model.path/<name>``."""

    config: Config
    files: Mapping[str, InputFile]

    def digests(self) -> dict[str, str]:
        """Return the hash of each file, and of the settings that order the prompts, for a checkpoint."""
        return {key: file.sha256 for key, file in self.files.items()} | _order_digest(self.config)

    def read_data(self, key: str) -> bytes | None:
        """Check that the data set ``key`` is unchanged, as :meth:`read` does.

        Returns the content if it is one file. Returns None for a directory and for a data set on the hub.
        """
        file = self.files[key]
        if not _is_collection(key, file.path):
            return self.read(key)
        if not _is_same(key, file.path, file):
            raise _changed(key, file.path, "its content has changed")
        return None

    def read(self, key: str) -> bytes:
        """Return the content of the file ``key``. Raises InputChangedError if it has changed since the run started."""
        path = self.files[key].path
        try:
            content = path.read_bytes()
        except OSError as exc:
            raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc
        if hashlib.sha256(content).hexdigest() != self.files[key].sha256:
            raise _changed(key, path, "its content has changed")
        return content

    def source(self, key: str) -> bytes | None:
        """Return the checked source of the user's function ``key``; None if the function is not in a Python file."""
        file = self.files.get(key)
        return self.read(key) if file is not None and file.path.suffix == ".py" else None

    @contextmanager
    def unchanged(self, role: Role) -> Iterator[None]:
        """Check the files of ``role`` before and after the block. Prompts are not among them: see :meth:`read_data`.

        Raises InputChangedError if a file has changed since the run started. A file above ``LARGE_NBYTES`` may be
        accepted without a hash: see the module's docstring.
        """
        self._compare(role)
        try:
            yield
        finally:
            self._compare(role)

    def _compare(self, role: Role) -> None:
        expected = {key: file for key, file in self.files.items() if _reads(role, key)}
        existing = {key: path for key, path in _find_files(self.config).items() if _reads(role, key)}
        for key, path in existing.items():
            if key not in expected:
                raise _changed(key, path, "it did not exist when the run started")
        for key, file in expected.items():
            if key not in existing:
                raise _changed(key, file.path, "it no longer exists")
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            same = list(threads.map(lambda key: _is_same(key, existing[key], expected[key]), expected))
        for key, is_same in zip(expected, same, strict=True):
            if not is_same:
                raise _changed(key, existing[key], "its content has changed")

    def compare_with_checkpoint(self, extra: Mapping[str, Any]) -> list[str]:
        """Compare the files with the checkpoint whose extra state is ``extra``.

        Returns a sentence for each changed file that may change. Raises ConfigError for a file that may not: the
        training prompts, the model's configuration, its tokenizer, and the weights of a reference model.
        """
        saved, now, model = extra["inputs"], self.digests(), self.config.model.path
        changed = [key for key in sorted({*saved, *now}) if saved.get(key) != now.get(key)]
        of_data = [key for key in changed if key in self.files and _is_of_training_data(key)]
        data = ", ".join(str(self.files[key].path) for key in of_data) or TRAIN
        rules: list[tuple[Callable[[str], bool], str, str]] = [
            (
                _is_of_training_data,
                f"{data} does not hold the checkpoint's training data",
                "the order of the prompts depends on it, so some prompts would be lost or trained twice",
            ),
            (
                MODEL_CONFIG.__eq__,
                f"the checkpoint does not belong to the model in {model}",
                "the model's tensors depend on it",
            ),
            (
                _is_of_tokenizer,
                f"the tokenizer in {model} is not the checkpoint's",
                "prompts would get other tokens",
            ),
            (
                self._is_of_reference,
                "the weights of the reference model are not those of the checkpoint's",
                "the reference never changes in a run",
            ),
        ]
        for concerns, what, why in rules:
            if keys := list(filter(concerns, changed)):
                raise ConfigError(
                    what,
                    why=f"changed since the checkpoint was saved: {', '.join(keys)}; {why}",
                    fix="restore the old files and settings, or start a new run in another dir=…",
                )
        return [
            f"{key} has changed since the checkpoint was saved; the run continues with the new content"
            for key in changed
        ]

    def _is_of_reference(self, key: str) -> bool:
        model = MODEL if self.config.algorithm.reference is None else REFERENCE
        return self.config.has_reference_copy and key.startswith(model) and key.endswith(_WEIGHTS)


def identify_inputs(config: Config) -> RunInputs:
    """Hash all input files of a run. Raises DataError if a file cannot be read."""
    paths = _find_files(config)
    try:
        with ThreadPoolExecutor(_HASH_THREADS) as threads:
            files = dict(zip(paths, threads.map(_identify, paths, paths.values()), strict=True))
    except OSError as exc:
        raise DataError(
            f"{exc.filename} cannot be read",
            why=exc.strerror or str(exc),
            fix="make the file readable",
        ) from exc
    return RunInputs(config, files)


def _find_files(config: Config) -> dict[str, Path]:
    """Return the input files that exist now, by key."""
    paths = {data_key(TRAIN, data_set.name): data_set.path for data_set in config.data.train_sets}
    paths |= {data_key(EVAL, data_set.name): data_set.path for data_set in config.data.eval_sets}
    if (template := config.data.chat_template_file) is not None:
        paths[TEMPLATE] = template
    for key in _FUNCTIONS:
        section, name = key.split(".")
        target = str(getattr(getattr(config, section), name))
        if ":" in target and (path := function_file(target)) is not None and path.is_file():  # else it is built in
            paths[key] = path
    files = {key: Path(target.rpartition(":")[0]) for key, target in config.rollout.workflow_functions.items()}
    paths |= {key: path for key, path in files.items() if path.is_file()}
    for key, named in config.models.items():
        model = model_directory(named)
        for path in sorted([*model.glob("*"), *model.glob("additional_chat_templates/*")]):
            if path.is_file() and not path.name.startswith(".") and path.suffix != ".md":
                paths[f"{key}/{path.relative_to(model).as_posix()}"] = path
    return paths


def data_key(key: str, name: str) -> str:
    """Return the key of a data set's file: ``key/name``, or ``key`` if the run has one data set, without a name."""
    return f"{key}/{name}" if name else key


def _order_digest(config: Config) -> dict[str, str]:
    """Return a hash of the settings that determine the order of the prompts, in addition to their content.

    Returns nothing for one data set with default settings. So the digests of most runs are those of an older hwrl.
    """
    sets = [(data_set.name, data_set.weight, *config.data.keys_of(data_set)) for data_set in config.data.train_sets]
    function = (config.data.curriculum or "").rpartition(":")[2]  # its file may move, and is hashed separately
    if sets == [("", 1.0, "prompt", "answer")] and not function:
        return {}
    return {ORDER: hashlib.sha256(json.dumps([sets, function]).encode()).hexdigest()}


def _is_of_training_data(key: str) -> bool:
    return key in (ORDER, CURRICULUM) or key.partition("/")[0] == TRAIN


def _reads(role: Role, key: str) -> bool:
    """Return whether a process of ``role`` checks the file in :meth:`RunInputs.unchanged`.

    A replica does not check weight files, because it gets the weights from the trainer. It checks the prompts while
    reading them: see :meth:`RunInputs.read_data`. A trainer reads no prompts, but it checks them, because the ledger's
    state in its checkpoints depends on them.
    """
    if key in _FUNCTIONS:
        return role == _FUNCTIONS[key]
    if key.startswith(f"{WORKFLOW}_options"):
        return role == "rollout"
    if role == "trainer":
        return key.startswith((TRAIN, MODEL, *_OF_TRAINER))
    return not key.startswith((TRAIN, EVAL, *_OF_TRAINER)) and not key.endswith(_WEIGHTS)


def _identify(key: str, path: Path) -> InputFile:
    if _is_collection(key, path):
        return InputFile(path, digest_rows(path), ())
    stamp = _stamp(path)  # taken before the content is read: a write in between then changes it
    return InputFile(path, _digest(key, path), stamp)


def _is_collection(key: str, path: Path) -> bool:
    """Return whether ``key`` is a data set in a directory or on the hub: it is hashed row by row or file by file."""
    return key.startswith((TRAIN, EVAL)) and (path.is_dir() or is_on_hub(path))


def _is_same(key: str, path: Path, file: InputFile) -> bool:
    try:
        if _is_collection(key, path):
            return digest_rows(path) == file.sha256
        stamp = _stamp(path)
        return (stamp == file.stamp and path.stat().st_size > LARGE_NBYTES) or _digest(key, path) == file.sha256
    except OSError as exc:
        raise _changed(key, path, f"it cannot be read: {exc.strerror}") from exc


def _stamp(path: Path) -> tuple[int, ...]:
    status = os.stat(path)  # without st_dev: each machine has its own number for a shared file system
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _digest(key: str, path: Path) -> str:
    if key == MODEL_CONFIG:
        return _model_config_digest(path.read_bytes())
    with open_to_read(path, follow_links=True) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_config_digest(content: bytes) -> str:
    """Return a hash of a model's configuration without its original path and the version of transformers."""
    try:
        configuration = dict(json.loads(content))
    except (ValueError, TypeError, RecursionError):  # loading the model will report the error
        return hashlib.sha256(content).hexdigest()
    kept = {key: value for key, value in configuration.items() if key not in ("_name_or_path", "transformers_version")}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def _is_of_tokenizer(key: str) -> bool:
    name = key.removeprefix(f"{MODEL}/")
    return name != key and (name.startswith(_TOKENIZER_PREFIXES) or name.endswith(_TOKENIZER_SUFFIXES))


def _changed(key: str, path: Path, how: str) -> InputChangedError:
    return InputChangedError(
        f"{path} changed during the run",
        why=f"{key} names it, and {how}; a process that starts now would not continue the same run",
        fix="restore the old file and continue with resume=true, or start a new run in another dir=…",
    )
