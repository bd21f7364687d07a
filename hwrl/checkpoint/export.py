"""Verified copies of checkpoints: :func:`copy_for_torch` for torch's own format, and :func:`join_parts` of nodes."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hwrl.checkpoint.directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.layout import require_stored, seal, write_torch_metadata
from hwrl.checkpoint.load import read_entries
from hwrl.checkpoint.manifest import (
    EXTRA_NAME,
    LAYOUT_NAME,
    CheckpointInfo,
    corrupt_error,
    find_checkpoints,
    hold_for_reading,
    read_extra,
    verify_files,
)
from hwrl.errors import CheckpointNotFoundError, CheckpointSaveError

_REWRITTEN = (LAYOUT_NAME, EXTRA_NAME)


def copy_files(
    info: CheckpointInfo, directory: Path, names: Collection[str], *, fs: DurableFS
) -> dict[str, FileRecord]:
    """Copy the files ``names`` into ``directory``. Return their records by name.

    Raises CheckpointCorruptError if a file's content differs from its hash in the manifest.
    """
    for name in sorted(names):
        fs.mkdir((directory / name).parent)
        with (info.path / name).open("rb") as source, fs.create_stream(directory / name) as target:
            shutil.copyfileobj(source, target, 16 << 20)
    copied = fs.take_records(directory)
    for name, record in copied.items():
        if record != info.manifest.files[name]:
            raise corrupt_error(info.path, f"the content of {name} does not match its hash")
    return copied


def copy_for_torch(info: CheckpointInfo, directory: Path, *, aside: str, fs: DurableFS) -> bytes | None:
    """Copy the state of a checkpoint into the empty ``directory``, and add torch's own ``.metadata``.

    ``.metadata`` omits the name ``aside``. If it is a plain value, its bytes are returned as ``torch.save`` wrote them;
    otherwise None is returned. Whole files are copied, so these bytes may also be in a copy. Every file of the
    checkpoint is verified. The content of the copies is durable when this returns, but their names are not.

    Raises :class:`~hwrl.errors.CheckpointCorruptError` if the checkpoint is damaged, OSError if ``directory`` cannot be
    written, and ValueError if the checkpoint is one node's part and lacks chunks of a tensor.
    """
    with hold_for_reading(info):
        verify_files(info, [LAYOUT_NAME])
        entries = read_entries(info)
        copied = [entry for entry in entries if entry["name"] != aside]
        names = {entry["file"] for entry in copied}
        verify_files(info, info.manifest.files.keys() - names - {LAYOUT_NAME})  # copy_files verifies the others
        copy_files(info, directory, names, fs=fs)
        write_torch_metadata(fs, directory, copied)
        for entry in entries:
            if entry["name"] == aside and entry["kind"] == "BYTE_IO":
                with (info.path / entry["file"]).open("rb") as file:
                    file.seek(entry["start"])
                    data: bytes = file.read(entry["nbytes"])
                try:
                    require_stored(data)
                except ValueError as exc:
                    raise corrupt_error(info.path, f"its data cannot be read: {exc}") from exc
                return data
    return None


# -- the parts of several nodes -------------------------------------------------------------------------------------


def join_parts(directories: Sequence[Path], out: Path, *, step: int | None = None) -> int:
    """Join the parts of ``step`` into one checkpoint in ``out``, and return the step.

    Without ``step``, join the newest step that has all its parts in ``directories``. Every file is verified when it is
    copied, and ``directories`` are not changed. In ``out``, no intact checkpoint is replaced or removed, and the
    tracker never goes back to an earlier step.

    Raises :class:`~hwrl.errors.CheckpointNotFoundError` if ``directories`` do not hold all parts of one save,
    :class:`~hwrl.errors.CheckpointCorruptError` if a part is damaged, and :class:`~hwrl.errors.CheckpointSaveError` if
    ``out`` is one of ``directories``, already has this step or a later one, or is on a full disk. The errors of opening
    a :class:`CheckpointDirectory` are raised, too.
    """
    parts = _find_parts(directories, step)
    manifest = parts[0].manifest
    if any(out.exists() and out.samefile(directory) for directory in directories):
        raise _failed(manifest.step, f"{out} is one of the directories with the parts", fix="choose another --out")
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(hold_for_reading(part))
        fs = DurableFS()
        target = CheckpointDirectory(out, fs)
        stack.callback(target.close)
        newest = max((info.step for info in find_checkpoints(out)[0]), default=-1)
        if newest >= manifest.step:
            raise _failed(manifest.step, f"{out} already has step {newest}", fix="choose another --out")
        with _drafting(target, manifest.step) as draft:
            _fill(draft, parts, fs)
            target.commit(draft, manifest.step)
            target.set_tracker(max(manifest.step, target.announced_step))
    return manifest.step


def _find_parts(directories: Sequence[Path], step: int | None) -> list[CheckpointInfo]:
    """Return the parts of the newest save that has all its parts in ``directories``, in the order of the nodes."""
    saves: dict[tuple[int, str], dict[int, CheckpointInfo]] = {}
    for directory in directories:
        for info in find_checkpoints(directory)[0]:
            saves.setdefault((info.step, info.manifest.save_id), {})[info.manifest.node] = info
    with_all_parts = {
        found: parts
        for (found, _), parts in saves.items()
        if step in (None, found) and len(parts) == next(iter(parts.values())).manifest.nodes
    }
    if not with_all_parts:
        found_nodes = {found: sorted(parts) for (found, _), parts in sorted(saves.items())}
        raise CheckpointNotFoundError(
            "no checkpoint has all its parts in these directories"
            if step is None
            else f"step {step} does not have all its parts in these directories",
            why=f"for each step, these nodes' parts were found: {found_nodes}",
            fix="give the checkpoint directory of every node that saved",
        )
    return [info for _, info in sorted(with_all_parts[max(with_all_parts)].items())]


@contextlib.contextmanager
def _drafting(target: CheckpointDirectory, step: int) -> Iterator[Path]:
    """Yield a new draft in ``target``. If the block fails, remove it. Raise an OSError as CheckpointSaveError."""
    save_id = os.urandom(8).hex()  # not the id in the parts' manifests: it becomes a part of a path
    draft = draft_path(target.path, step, save_id)
    try:
        target.create_draft(step, save_id)
        yield draft
    except BaseException as exc:
        target.remove_draft(draft)
        if not isinstance(exc, OSError):
            raise
        why = f"{exc.strerror}: {exc.filename or target.path}"
        intact: list[CheckpointInfo] = []
        with contextlib.suppress(CheckpointNotFoundError):  # the broken disk may refuse this, too
            intact = find_checkpoints(target.path)[0]
        if any(info.step == step for info in intact):
            why = f"it is complete in {target.path}, but its name may not be durable or not in the tracker ({why})"
        raise _failed(step, why, fix="fix the cause, or choose another --out") from exc


def _fill(draft: Path, parts: Sequence[CheckpointInfo], fs: DurableFS) -> None:
    files: dict[str, FileRecord] = {}
    for part in parts:
        verify_files(part, _REWRITTEN)
        files |= copy_files(part, draft, part.manifest.files.keys() - {*_REWRITTEN}, fs=fs)
    # Two nodes may have the same chunk. The part of the first of them is used: it comes last here.
    entries = {
        (entry["name"], tuple(entry.get("offsets", ()))): entry for part in parts[::-1] for entry in read_entries(part)
    }
    shared, ranks = read_extra(parts[0])
    manifest = replace(parts[0].manifest, node=0, nodes=1, files=files)
    try:
        seal(fs, draft, list(entries.values()), {"all": shared, "ranks": ranks}, manifest)
    except ValueError as exc:
        raise corrupt_error(parts[0].path, f"the parts of all nodes do not make up one checkpoint: {exc}") from exc


def _failed(step: int, why: str, *, fix: str) -> CheckpointSaveError:
    return CheckpointSaveError(f"cannot join the parts of step {step}", why=why, fix=fix)
