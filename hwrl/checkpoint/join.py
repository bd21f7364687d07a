"""One whole checkpoint from the parts that nodes have on disks of their own: :func:`join_parts`."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.home import CheckpointHome
from hwrl.checkpoint.layout import LAYOUT_NAME, Json, LayoutReader
from hwrl.checkpoint.manifest import CheckpointInfo, find_checkpoints, in_use, verify_files
from hwrl.checkpoint.save import EXTRA_NAME, seal
from hwrl.errors import CheckpointNotFoundError

_REWRITTEN = {LAYOUT_NAME, EXTRA_NAME}


def join_parts(directories: Sequence[Path], out: Path, *, step: int | None = None) -> int:
    """Copy the parts of ``step``, or of the newest of which all are there, into ``out``; return the step.

    Every file is verified before it is copied. Raises :class:`~hwrl.errors.CheckpointNotFoundError` if ``directories``
    do not hold all parts of one save, and what :class:`CheckpointHome` raises about ``out``, which may be a trainer's
    new directory.
    """
    parts = _find_parts(directories, step)
    with contextlib.ExitStack() as stack:
        for part in parts:
            stack.enter_context(in_use(part))
            verify_files(part, part.manifest.files)
        fs = DurableFS()
        home = CheckpointHome(out, fs)
        stack.callback(home.close)
        manifest = parts[0].manifest
        draft = home.begin(manifest.step, manifest.save_id)
        for part in parts:
            _copy_files(part, draft, fs)
        entries = {(one["name"], tuple(one.get("offsets", ()))): one for part in parts[::-1] for one in _layout(part)}
        extra = json.loads((parts[0].path / EXTRA_NAME).read_bytes())
        files = fs.take_records(draft)
        seal(fs, draft, list(entries.values()), extra, replace(manifest, node=0, nodes=1, files=files))
        home.commit(draft, manifest.step)
        home.set_tracker(manifest.step)
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


def _copy_files(part: CheckpointInfo, draft: Path, fs: DurableFS) -> None:
    for name in sorted(part.manifest.files.keys() - _REWRITTEN):
        fs.mkdir((draft / name).parent)
        with (part.path / name).open("rb") as source, fs.create_stream(draft / name, "wb") as target:
            shutil.copyfileobj(source, target, 16 << 20)


def _layout(part: CheckpointInfo) -> list[Json]:
    LayoutReader(part).read_metadata()  # raises if it makes no sense
    return [dict(entry) for entry in json.loads((part.path / LAYOUT_NAME).read_bytes())]
