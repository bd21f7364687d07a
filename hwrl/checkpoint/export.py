"""Verified copies of a checkpoint's files: :func:`copy_files`, and :func:`copy_for_torch` for torch's own format."""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

from hwrl.checkpoint.durable import DurableFS, FileRecord
from hwrl.checkpoint.layout import Json, require_stored, write_torch_metadata
from hwrl.checkpoint.load import read_entries
from hwrl.checkpoint.manifest import LAYOUT_NAME, CheckpointInfo, corrupt_error, hold_for_reading, verify_files


def copy_files(
    info: CheckpointInfo, directory: Path, names: Collection[str], *, fs: DurableFS
) -> dict[str, FileRecord]:
    """Copy the files ``names`` into ``directory``. Return their records by name.

    Raises CheckpointCorruptError if a file's content differs from its hash in the manifest.
    """
    for name in sorted(names):
        fs.mkdir((directory / name).parent)
        with (info.path / name).open("rb") as source, fs.create_stream(directory / name, "wb") as target:
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
                    _require_stored(info, file, entry)
                    file.seek(entry["start"])
                    return bytes(file.read(entry["nbytes"]))
    return None


def _require_stored(info: CheckpointInfo, file: BinaryIO, entry: Json) -> None:
    try:
        require_stored(file, start=entry["start"], nbytes=entry["nbytes"])
    except ValueError as exc:
        raise corrupt_error(info.path, f"its data cannot be read: {exc}") from exc
