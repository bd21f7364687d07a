"""MANIFEST.json, the list of a complete checkpoint's files; finding and verifying checkpoints."""

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

from hwrl.checkpoint.directory.durable import FileRecord
from hwrl.errors import CheckpointCorruptError, CheckpointNotFoundError

MANIFEST_NAME, LAYOUT_NAME, EXTRA_NAME = "MANIFEST.json", "layout.json", "extra.json"
SCHEMA = 2
MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors from reading damaged or forged JSON. A million brackets raise RecursionError."""
_MAX_MANIFEST_NBYTES = 1 << 28
_STEP_NAME = re.compile(r"global_step_(0|[1-9]\d*)")


def step_name(step: int) -> str:
    """Return the directory name of ``step``.

    >>> step_name(12)
    'global_step_12'
    """
    return f"global_step_{step}"


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's directory name, None for any other name.

    >>> step_of("global_step_12"), step_of("global_step_012"), step_of(".tmp_global_step_12")
    (12, None, None)
    """
    found = _STEP_NAME.fullmatch(name)
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Manifest:
    """The content of MANIFEST.json. ``files`` maps relative POSIX names to size and hash, for all other files.

    ``save_id`` is unique to one call of save, ``world_size`` is the number of ranks in it, and ``versions`` are
    those of the libraries. Where nodes have disks of their own, the checkpoint is the part of ``node``, one of
    ``nodes``.
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
        """Return the file's content: sorted JSON, with a hash of itself at the end."""
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**body, "manifest_sha256": _hash(body)}, indent=1, sort_keys=True).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the result of :meth:`to_bytes`; ValueError, KeyError or TypeError for anything else."""
        body = json.loads(data)
        if body.pop("manifest_sha256") != _hash(body):
            raise ValueError("its content does not match its own hash")
        if body.pop("schema") != SCHEMA:
            raise ValueError(f"its schema is not {SCHEMA}")
        files = {name: FileRecord(one["nbytes"], one["sha256"]) for name, one in body["files"].items()}
        manifest = cls(**{**body, "files": files})
        manifest._check_types()
        return manifest

    def _check_types(self) -> None:
        counts = [self.step, self.world_size, self.weight_version, self.node, self.nodes]
        counts += [one.nbytes for one in self.files.values()]
        texts = [self.save_id, *self.versions, *self.versions.values(), *(one.sha256 for one in self.files.values())]
        if not all(type(one) is int for one in counts) or not all(type(one) is str for one in texts):
            raise TypeError("a field has the wrong type")
        datetime.fromtimestamp(self.saved_unix_s, UTC)


@dataclass(frozen=True)
class CheckpointInfo:
    """One checkpoint on a disk, intact there. Other nodes may lack their parts."""

    path: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """The step of the save."""
        return self.manifest.step

    @property
    def weight_version(self) -> int:
        """The version of the weights in it."""
        return self.manifest.weight_version

    @property
    def nbytes(self) -> int:
        """The bytes of all its files but the manifest."""
        return sum(record.nbytes for record in self.manifest.files.values())


@dataclass(frozen=True)
class Skipped:
    """A directory named like a checkpoint but incomplete, and the reason."""

    path: Path
    reason: str


def inspect_checkpoint(path: Path) -> CheckpointInfo:
    """Return the checkpoint in ``path`` if its manifest is good and every file has the size in the manifest.

    Reads the manifest only. Raises :class:`~hwrl.errors.CheckpointCorruptError` otherwise, also for symbolic links and
    for names outside the directory.
    """
    try:
        if path.is_symlink():
            raise ValueError("it is a symbolic link")
        manifest_path = path / MANIFEST_NAME
        _check_regular(path, MANIFEST_NAME)
        if manifest_path.stat().st_size > _MAX_MANIFEST_NBYTES:
            raise ValueError(f"{MANIFEST_NAME} has more than {_MAX_MANIFEST_NBYTES:,} bytes")
        manifest = Manifest.from_bytes(manifest_path.read_bytes())
        if manifest.step != step_of(path.name):
            raise ValueError(f"its manifest is of step {manifest.step}")
        for name in (LAYOUT_NAME, EXTRA_NAME):  # these files must be verified before they are read
            if name not in manifest.files:
                raise ValueError(f"its manifest does not name {name}")
        for name, record in manifest.files.items():
            _check_size(path, name, record.nbytes)
    except (OSError, *MALFORMED) as exc:
        raise corrupt_error(path, _reason(exc)) from exc
    return CheckpointInfo(path, manifest)


def verify_files(info: CheckpointInfo, names: Iterable[str]) -> None:
    """Read the files ``names`` of a checkpoint and compare hashes; CheckpointCorruptError if one differs."""
    for name in names:
        try:
            with (info.path / name).open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as exc:
            raise corrupt_error(info.path, _reason(exc)) from exc
        if digest != info.manifest.files[name].sha256:
            raise corrupt_error(info.path, f"the content of {name} does not match its hash")


def read_extra(info: CheckpointInfo) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return ``extra``, and the ``rank_extra`` of each rank; CheckpointCorruptError if the file makes no sense."""
    try:
        extra = json.loads((info.path / EXTRA_NAME).read_bytes())
        shared, ranks = dict(extra["all"]), [dict(one) for one in extra["ranks"]]
    except (OSError, *MALFORMED) as exc:
        raise corrupt_error(info.path, f"{EXTRA_NAME} cannot be read: {exc}") from exc
    if len(ranks) != info.manifest.world_size:
        raise corrupt_error(info.path, f"{EXTRA_NAME} is of {len(ranks)} ranks, the manifest of others")
    return shared, ranks


def find_checkpoints(directory: str | os.PathLike[str]) -> tuple[list[CheckpointInfo], list[Skipped]]:
    """Return the checkpoints intact in ``directory``, oldest step first, and the incomplete ones.

    Takes no lock and changes nothing; hashes are not read. Safe beside a running trainer. Raises
    :class:`~hwrl.errors.CheckpointNotFoundError` if ``directory`` cannot be read.
    """
    try:
        paths = list(Path(directory).iterdir())
    except OSError as exc:
        raise CheckpointNotFoundError(
            f"no checkpoint can be found in {directory}",
            why=f"{exc.strerror}: {exc.filename}",
            fix="give the directory that holds global_step_N/; of a run, its checkpoints/",
        ) from exc
    intact, skipped = [], []
    for path in paths:
        if step_of(path.name) is None:
            continue
        try:
            intact.append(inspect_checkpoint(path))
        except CheckpointCorruptError as exc:
            if os.path.lexists(path):  # otherwise a trainer has removed it meanwhile
                skipped.append(Skipped(path, exc.why))
    return sorted(intact, key=lambda info: info.step), sorted(skipped, key=lambda one: one.path)


@contextlib.contextmanager
def hold_for_reading(info: CheckpointInfo) -> Iterator[None]:
    """Keep a trainer from removing the checkpoint during the block. CheckpointCorruptError if it is gone.

    It is a shared lock on the manifest. It ends with the process.
    """
    path = info.path / MANIFEST_NAME
    with contextlib.ExitStack() as stack:
        try:
            manifest = stack.enter_context(path.open("rb"))
            fcntl.flock(manifest, fcntl.LOCK_SH)
            is_there = os.path.samestat(os.fstat(manifest.fileno()), path.stat())
        except OSError as exc:
            raise corrupt_error(info.path, _reason(exc)) from exc
        if not is_there:  # removed between the open and the lock, and saved again
            raise corrupt_error(info.path, "it was replaced meanwhile")
        yield


@contextlib.contextmanager
def hold_for_removal(path: Path) -> Iterator[bool]:
    """Yield True if no process holds the checkpoint in ``path`` for reading; none can begin to during the block."""
    with (path / MANIFEST_NAME).open("r+b") as manifest:  # NFS refuses an exclusive lock on a file opened for reading
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def corrupt_error(path: Path, reason: str) -> CheckpointCorruptError:
    """Return the error for a damaged checkpoint."""
    return CheckpointCorruptError(
        f"{path.name} is not a complete checkpoint",
        why=reason,
        fix=f"resume from another step, or restore {path} from a copy",
    )


def _check_size(directory: Path, name: str, nbytes: int) -> None:
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or str(PurePosixPath(name)) != name:
        raise ValueError(f"its manifest names {name!r}, which is no path inside it")
    for depth in range(1, len(parts)):
        if (directory / Path(*parts[:depth])).is_symlink():
            raise ValueError(f"{name} lies behind a symbolic link")
    actual = _check_regular(directory, name)
    if actual != nbytes:
        raise ValueError(f"{name} has {actual:,} bytes and the manifest says {nbytes:,}")


def _check_regular(directory: Path, name: str) -> int:
    try:
        status = (directory / name).lstat()
    except FileNotFoundError as exc:
        raise ValueError(f"{name} is missing") from exc
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{name} is a symbolic link or no regular file")
    return status.st_size


def _hash(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _reason(exc: Exception) -> str:
    if isinstance(exc, OSError):
        return f"{exc.strerror}: {exc.filename}"
    if not isinstance(exc, ValueError) or isinstance(exc, (json.JSONDecodeError, UnicodeDecodeError)):
        return f"{MANIFEST_NAME} cannot be read: {exc}"
    return str(exc)
