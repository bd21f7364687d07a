"""What a checkpoint holds, for programs that read torch's own format: :func:`copy_for_torch`."""

from __future__ import annotations

import shutil
from pathlib import Path

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.layout import read_entries, write_torch_metadata
from hwrl.checkpoint.manifest import CheckpointInfo, in_use, verify_files


def copy_for_torch(info: CheckpointInfo, directory: Path, *, aside: str, fs: DurableFS) -> bytes | None:
    """Copy the state in ``info`` into the empty ``directory``, with torch's own ``.metadata``, but for one value.

    Returns that one, of the name ``aside``, as ``torch.save`` wrote it, or None if there is no such value. Every file
    is verified first, and what is written is durable, but for the names in ``directory``. Raises
    :class:`~hwrl.errors.CheckpointCorruptError` if the checkpoint is not whole, and OSError from ``directory``.
    """
    with in_use(info):
        verify_files(info, info.manifest.files)
        entries = read_entries(info)
        rest = [entry for entry in entries if entry["name"] != aside]
        for name in sorted({entry["file"] for entry in rest}):
            with (info.path / name).open("rb") as source, fs.create_stream(directory / name, "wb") as target:
                shutil.copyfileobj(source, target, 16 << 20)
        write_torch_metadata(fs, directory, rest)
        for entry in entries:
            if entry["name"] == aside and entry["kind"] == "BYTE_IO":
                with (info.path / entry["file"]).open("rb") as file:
                    file.seek(entry["start"])
                    return bytes(file.read(entry["nbytes"]))
    return None
