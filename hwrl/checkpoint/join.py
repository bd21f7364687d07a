"""One whole checkpoint from the parts that nodes have on disks of their own: :func:`join_parts`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hwrl.checkpoint.directory.checkpoint_directory import CheckpointDirectory, draft_path
from hwrl.checkpoint.directory.durable import DurableFS, FileRecord
from hwrl.checkpoint.format.copies import copy_files
from hwrl.checkpoint.format.layout import read_entries
from hwrl.checkpoint.format.manifest import (
    EXTRA_NAME,
    LAYOUT_NAME,
    CheckpointInfo,
    corrupt,
    find_checkpoints,
    in_use,
    read_extra,
    verify_files,
)
from hwrl.checkpoint.saving.save import seal
from hwrl.errors import CheckpointNotFoundError, CheckpointSaveError

_REWRITTEN = (LAYOUT_NAME, EXTRA_NAME)


def join_parts(directories: Sequence[Path], out: Path, *, step: int | None = None) -> int:
    """Copy the parts of ``step``, or of the newest of which all are there, into ``out``; return the step.

    Every file is verified as it is copied, and ``directories`` are left as they are. Nothing that is complete in
    ``out`` is replaced or removed, and its tracker never goes back. Raises
    :class:`~hwrl.errors.CheckpointNotFoundError` if ``directories`` do not hold all parts of one save,
    :class:`~hwrl.errors.CheckpointCorruptError` if one of them is damaged, :class:`~hwrl.errors.CheckpointSaveError`
    if ``out`` is one of them, has that step or a later one, or has no room, and what
    :class:`CheckpointDirectory` raises about ``out``, which may be a trainer's new directory.
    """
    parts = _find_parts(directories, step)
    manifest = parts[0].manifest
    if any(out.exists() and out.samefile(directory) for directory in directories):
        raise _failed(manifest.step, f"{out} is one of the directories with the parts", fix="give another --out")
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(in_use(part))
        fs = DurableFS()
        home = CheckpointDirectory(out, fs)
        stack.callback(home.close)
        newest = max((info.step for info in home.complete()), default=-1)
        if newest >= manifest.step:
            raise _failed(manifest.step, f"{out} already holds step {newest}, complete", fix="give another --out")
        with _drafting(home, manifest.step) as draft:
            _fill(draft, parts, fs)
            home.commit(draft, manifest.step)
            home.set_tracker(max(manifest.step, home.announced))
    return manifest.step


def _find_parts(directories: Sequence[Path], step: int | None) -> list[CheckpointInfo]:
    """Return all parts of the newest save that has them all, by node."""
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
def _drafting(home: CheckpointDirectory, step: int) -> Iterator[Path]:
    """Yield a new draft in ``home``, which is removed after an error; the disk's own is raised as hwrl's."""
    save_id = os.urandom(8).hex()  # of its own: the parts' comes from a file
    draft = draft_path(home.directory, step, save_id)
    try:
        home.begin(step, save_id)
        yield draft
    except BaseException as exc:
        home.abandon(draft)
        if not isinstance(exc, OSError):
            raise
        why = f"{exc.strerror}: {exc.filename or home.directory}"
        complete: list[CheckpointInfo] = []
        with contextlib.suppress(CheckpointNotFoundError):  # the same disk
            complete = home.complete()
        if any(info.step == step for info in complete):
            why = f"it is complete in {home.directory}, but its name may not be durable or not in the tracker ({why})"
        raise _failed(step, why, fix="mend the cause, or give another --out") from exc


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
        raise corrupt(parts[0].path, f"with the parts of the other nodes it is not whole: {exc}") from exc


def _failed(step: int, why: str, *, fix: str) -> CheckpointSaveError:
    return CheckpointSaveError(f"joining the parts of step {step} failed", why=why, fix=fix)
