"""One whole checkpoint from the parts on the disks of several nodes: :func:`join_parts`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.format.copies import copy_files
from hwrl.checkpoint.format.loading import read_entries
from hwrl.checkpoint.format.manifest import (
    EXTRA_NAME,
    LAYOUT_NAME,
    CheckpointInfo,
    corrupt_error,
    find_checkpoints,
    hold_for_reading,
    read_extra,
    verify_files,
)
from hwrl.checkpoint.format.seal import seal
from hwrl.errors import CheckpointNotFoundError, CheckpointSaveError

_REWRITTEN = (LAYOUT_NAME, EXTRA_NAME)


def join_parts(directories: Sequence[Path], out: Path, *, step: int | None = None) -> int:
    """Copy the parts of ``step``, or of the newest step with all parts, into ``out``; return the step.

    Every file is verified as it is copied. ``directories`` stay unchanged. No complete checkpoint in ``out`` is
    replaced or removed, and its tracker never goes back.

    Raises :class:`~hwrl.errors.CheckpointNotFoundError` if ``directories`` do not hold all parts of one save,
    :class:`~hwrl.errors.CheckpointCorruptError` if a part is damaged, :class:`~hwrl.errors.CheckpointSaveError` if
    ``out`` is one of ``directories``, has this step or a later one, or has no room, and the errors of opening a
    :class:`CheckpointDirectory`.
    """
    parts = _find_parts(directories, step)
    manifest = parts[0].manifest
    if any(out.exists() and out.samefile(directory) for directory in directories):
        raise _failed(manifest.step, f"{out} is one of the directories with the parts", fix="give another --out")
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(hold_for_reading(part))
        fs = DurableFS()
        target = CheckpointDirectory(out, fs)
        stack.callback(target.close)
        newest = max((info.step for info in target.intact()), default=-1)
        if newest >= manifest.step:
            raise _failed(manifest.step, f"{out} already holds step {newest}, complete", fix="give another --out")
        with _drafting(target, manifest.step) as draft:
            _fill(draft, parts, fs)
            target.commit(draft, manifest.step)
            target.set_tracker(max(manifest.step, target.announced))
    return manifest.step


def _find_parts(directories: Sequence[Path], step: int | None) -> list[CheckpointInfo]:
    """Return the parts of the newest save with all parts, by node."""
    saves: dict[tuple[int, str], dict[int, CheckpointInfo]] = {}
    for directory in directories:
        for info in find_checkpoints(directory)[0]:
            saves.setdefault((info.step, info.manifest.save_id), {})[info.manifest.node] = info
    whole = {
        found: parts
        for (found, _), parts in saves.items()
        if step in (None, found) and len(parts) == next(iter(parts.values())).manifest.nodes
    }
    if not whole:
        have = {found: sorted(parts) for (found, _), parts in sorted(saves.items())}
        raise CheckpointNotFoundError(
            "no checkpoint has all its parts in these directories" if step is None else f"step {step} lacks parts",
            why=f"the nodes whose parts are there, by step: {have}",
            fix="name the checkpoint directory of every node that saved",
        )
    return [info for _, info in sorted(whole[max(whole)].items())]


@contextlib.contextmanager
def _drafting(target: CheckpointDirectory, step: int) -> Iterator[Path]:
    """Yield a new draft in ``target``. After an error the draft is removed; an OSError becomes CheckpointSaveError."""
    save_id = os.urandom(8).hex()  # a new one: the id of the parts is read from a file
    draft = draft_path(target.path, step, save_id)
    try:
        target.begin(step, save_id)
        yield draft
    except BaseException as exc:
        target.abandon(draft)
        if not isinstance(exc, OSError):
            raise
        why = f"{exc.strerror}: {exc.filename or target.path}"
        intact: list[CheckpointInfo] = []
        with contextlib.suppress(CheckpointNotFoundError):  # the same disk may refuse this too
            intact = target.intact()
        if any(info.step == step for info in intact):
            why = f"it is complete in {target.path}, but its name may not be durable or not in the tracker ({why})"
        raise _failed(step, why, fix="fix the cause, or give another --out") from exc


def _fill(draft: Path, parts: Sequence[CheckpointInfo], fs: DurableFS) -> None:
    files: dict[str, FileRecord] = {}
    for part in parts:
        verify_files(part, _REWRITTEN)
        files |= copy_files(part, draft, part.manifest.files.keys() - {*_REWRITTEN}, fs=fs)
    entries = {(one["name"], tuple(one.get("offsets", ()))): one for part in parts[::-1] for one in read_entries(part)}
    shared, ranks = read_extra(parts[0])
    manifest = replace(parts[0].manifest, node=0, nodes=1, files=files)
    try:
        seal(fs, draft, list(entries.values()), {"all": shared, "ranks": ranks}, manifest)
    except ValueError as exc:
        raise corrupt_error(parts[0].path, f"with the parts of the other nodes it is not whole: {exc}") from exc


def _failed(step: int, why: str, *, fix: str) -> CheckpointSaveError:
    return CheckpointSaveError(f"joining the parts of step {step} failed", why=why, fix=fix)
