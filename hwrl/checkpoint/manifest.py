"""MANIFEST.json, the list of a checkpoint's files. Also: find checkpoints in a directory, and verify their files.

The manifest is the last file of a draft, so a draft may have one, too. A checkpoint is intact if its directory has its
final name, ``global_step_<n>``, its manifest is valid, and each file in the manifest has its size.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from hwrl.checkpoint.durable import FileRecord
from hwrl.checkpoint.lock import try_flock
from hwrl.errors import CheckpointCorruptError, CheckpointNotFoundError, CheckpointSaveError
from hwrl.files import open_to_read, read_file

MANIFEST_NAME, LAYOUT_NAME, EXTRA_NAME = "MANIFEST.json", "layout.json", "extra.json"
SCHEMA = 2
MALFORMED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError)
"""The errors that damaged or forged JSON can raise. For example, a million brackets raise RecursionError."""
_MAX_MANIFEST_NBYTES = 1 << 28
MAX_JSON_NBYTES = 1 << 30
"""A larger layout, or extra state, is not read."""
_STEP_NAME = re.compile(r"global_step_(0|[1-9]\d*)")


def step_name(step: int) -> str:
    """Return the directory name of the checkpoint for ``step``.

    >>> step_name(12)
    'global_step_12'
    """
    return f"global_step_{step}"


def step_of(name: str) -> int | None:
    """Return the step in the name of a checkpoint's directory. For any other name, return None.

    >>> step_of("global_step_12"), step_of("global_step_012"), step_of(".tmp_global_step_12")
    (12, None, None)
    """
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json.

    ``save_id`` is a random id of the save, the same on all ranks and nodes. ``world_size`` is the number of ranks that
    saved. ``versions`` maps libraries to their versions. ``files`` maps the relative POSIX name of every other file to
    its size and hash.

    A node is a set of ranks that share one checkpoint directory. On a shared file system there is one node, however
    many hosts there are. ``nodes`` is the number of nodes in this save. The checkpoint is the part of node ``node``,
    counted from 0.
    """

    step: int
    save_id: str
    world_size: int
    weight_version: int
    saved_unix_s: float
    versions: Mapping[str, str]
    files: Mapping[str, FileRecord]
    node: int = 0
    nodes: int = 1

    def to_bytes(self) -> bytes:
        """Return the content of the file: JSON with sorted keys, and a hash of all other fields."""
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**body, "manifest_sha256": _hash(body)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the result of :meth:`to_bytes`. Other content raises one of the errors in :data:`MALFORMED`."""
        body = json.loads(data)
        if body.pop("manifest_sha256") != _hash(body):
            raise ValueError("its manifest does not match the hash in it")
        if body.pop("schema") != SCHEMA:
            raise ValueError(f"the schema of its manifest is not {SCHEMA}")
        files = {name: FileRecord(record["nbytes"], record["sha256"]) for name, record in body["files"].items()}
        manifest = cls(**{**body, "files": files})
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        counts = [self.step, self.world_size, self.weight_version, self.node, self.nodes]
        counts += [record.nbytes for record in self.files.values()]
        texts = [self.save_id, *self.versions, *self.versions.values()]
        texts += [record.sha256 for record in self.files.values()]
        if {*map(type, counts)} != {int} or {*map(type, texts)} != {str}:
            raise TypeError("a field has the wrong type")
        if max(map(abs, counts)) >= 1 << 63 or not 0 <= self.node < self.nodes:
            raise ValueError("a number in its manifest is not possible")
        datetime.fromtimestamp(self.saved_unix_s, UTC)


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint that is intact on this disk. Other nodes may lack their parts.

    In :class:`~hwrl.checkpoint.SavedTensors` for an ``export`` it is a draft, which is not yet complete.
    """

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The saved step."""
        return self.manifest.step

    @property
    def weight_version(self) -> int:
        """The version of the saved weights."""
        return self.manifest.weight_version

    @property
    def nbytes(self) -> int:
        """The size of all files except the manifest."""
        return sum(record.nbytes for record in self.manifest.files.values())


@dataclass(frozen=True)
class Skipped:
    """A directory that has a checkpoint's name but cannot be resumed, and the reason.

    Reasons: it is damaged (an invalid manifest, a missing file, a wrong size or a wrong hash) or cannot be read; or
    another node lacks its part or has a part of another save; or nodes are absent and no tracker names the step.
    """

    path: Path
    reason: str


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Return the checkpoint in ``path`` if it is intact: a valid manifest, and every file with its size.

    Reads no file but the manifest. Raises :class:`~hwrl.errors.CheckpointCorruptError` otherwise, and also for a
    symbolic link or a file name that leads out of the directory.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        _check_regular(path, MANIFEST_NAME)
        manifest = Manifest.from_bytes(read_file(path / MANIFEST_NAME, max_nbytes=_MAX_MANIFEST_NBYTES))
        if manifest.step != step_of(path.name):
            raise ValueError(f"its manifest is for step {manifest.step}")
        for name in (LAYOUT_NAME, EXTRA_NAME):  # these files must be verified before they are read
            if name not in manifest.files:
                raise ValueError(f"its manifest does not list {name}")
        for name, record in manifest.files.items():
            _check_size(path, name, record.nbytes)
    except (OSError, *MALFORMED) as exc:
        raise corrupt_error(path, _reason(exc)) from exc
    return CheckpointInfo(path, manifest)


def verify_files(info: CheckpointInfo, names: Iterable[str]) -> None:
    """Read the files ``names`` of a checkpoint. Raise CheckpointCorruptError if a hash differs from the manifest's."""
    for name in names:
        try:
            with open_to_read(info.path / name) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise corrupt_error(info.path, _reason(exc)) from exc
        if digest != info.manifest.files[name].sha256:
            raise corrupt_error(info.path, f"the content of {name} does not match its hash")


def read_extra(info: CheckpointInfo) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return ``extra``, and the ``rank_extra`` of each rank. Raise CheckpointCorruptError if the file is malformed."""
    try:
        extra = json.loads(read_file(info.path / EXTRA_NAME, max_nbytes=MAX_JSON_NBYTES))
        shared, ranks = dict(extra["all"]), [dict(rank_extra) for rank_extra in extra["ranks"]]
    except (OSError, *MALFORMED) as exc:
        raise corrupt_error(info.path, f"{EXTRA_NAME} cannot be read: {exc}") from exc
    if len(ranks) != info.manifest.world_size:
        why = f"{EXTRA_NAME} has the state of {len(ranks)} ranks and the manifest says {info.manifest.world_size}"
        raise corrupt_error(info.path, why)
    return shared, ranks


def copy_extra(value: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a deep copy of ``value``, so that the caller may change the original afterwards.

    Raises CheckpointSaveError for a value that JSON cannot hold, and for one that JSON would alter: a tuple, or a key
    that is not a string.
    """
    value = dict(value or {})
    try:
        copy: dict[str, Any] = json.loads(json.dumps(value))
    except (TypeError, ValueError) as exc:
        raise _not_json(str(exc)) from exc
    if copy != value:  # a number that is none differs from itself, and is not altered
        _refuse_altered(value)
    return copy


def _refuse_altered(value: object) -> None:
    if isinstance(value, tuple):
        raise _not_json(f"the tuple {value!r} would come back as a list")
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise _not_json(f"the key {key!r} is not a string and would come back as a string")
        value = list(value.values())
    if isinstance(value, list):
        for element in value:
            _refuse_altered(element)


def _not_json(why: str) -> CheckpointSaveError:
    return CheckpointSaveError(
        "the extra state cannot be saved",
        why=why,
        fix="give JSON: only string keys, and lists instead of tuples; put tensors into the state",
    )


def find_checkpoints(directory: str | os.PathLike[str]) -> tuple[list[CheckpointInfo], list[Skipped]]:
    """Return the checkpoints that are intact in ``directory``, oldest step first, and those that are not.

    File sizes are checked; hashes are not. It takes no lock and changes nothing, so it is safe while a trainer runs.
    Raises :class:`~hwrl.errors.CheckpointNotFoundError` if ``directory`` cannot be read.
    """
    try:
        paths = list(Path(directory).iterdir())
    except OSError as exc:
        raise CheckpointNotFoundError(
            f"cannot look for checkpoints in {directory}",
            why=f"{exc.strerror}: {exc.filename}",
            fix="give the directory that holds global_step_N/; in a run's directory, this is checkpoints/",
        ) from exc
    intact, skipped = [], []
    for path in paths:
        if step_of(path.name) is None:
            continue
        try:
            intact.append(inspect_checkpoint(path))
        except CheckpointCorruptError as exc:
            if os.path.lexists(path):  # otherwise a trainer has just removed it
                skipped.append(Skipped(path, exc.why))
    return sorted(intact, key=lambda info: info.step), sorted(skipped, key=lambda item: item.path)


@contextlib.contextmanager
def hold_for_reading(info: CheckpointInfo) -> Iterator[None]:
    """Prevent a trainer from removing the checkpoint during the block.

    It holds a shared lock on the manifest. The lock ends with the process. It does not prevent a rename of a damaged
    checkpoint to ``.broken_…``. Raises CheckpointCorruptError if the checkpoint has already been removed.
    """
    path = info.path / MANIFEST_NAME
    with contextlib.ExitStack() as stack:
        try:
            manifest = stack.enter_context(open_to_read(path))
            is_free = try_flock(manifest.fileno(), fcntl.LOCK_SH) is not False
            is_there = os.path.samestat(os.fstat(manifest.fileno()), path.stat())
        except OSError as exc:
            raise corrupt_error(info.path, _reason(exc)) from exc
        if not is_free:
            raise corrupt_error(info.path, "another process is removing it")
        if not is_there:  # it was removed between the open and the lock, and the step was saved again
            raise corrupt_error(info.path, "it was replaced while it was being opened")
        yield


def corrupt_error(path: Path, reason: str) -> CheckpointCorruptError:
    """Return the error for a checkpoint that is damaged or incomplete, or cannot be read."""
    return CheckpointCorruptError(
        f"{path.name} is damaged or incomplete, or cannot be read",
        why=reason,
        fix=f"use another step, or restore {path} from a copy",
    )


def _check_size(directory: Path, name: str, nbytes: int) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or str(PurePosixPath(name)) != name:
        raise ValueError(f"its manifest lists {name!r}, which is not a path inside it")
    for depth in range(1, len(parts)):
        if (directory / Path(*parts[:depth])).is_symlink():
            raise ValueError(f"the path {name} contains a symbolic link")
    actual = _check_regular(directory, name)
    if actual != nbytes:
        raise ValueError(f"{name} has {actual:,} bytes and the manifest says {nbytes:,}")


def _check_regular(directory: Path, name: str) -> int:
    try:
        status = (directory / name).lstat()
    except FileNotFoundError as exc:
        raise ValueError(f"{name} is missing") from exc
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is a symbolic link or not a regular file")
    return status.st_size


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError):
        return f"{exc.strerror}: {exc.filename}"
    if not isinstance(exc, ValueError) or isinstance(exc, (json.JSONDecodeError, UnicodeDecodeError)):
        return f"{MANIFEST_NAME} cannot be read: {exc}"
    return str(exc)
