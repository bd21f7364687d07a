"""The layout of a checkpoint: where each item lies in which file.

The layout is JSON, so no pickle is sent between ranks or executed. An entry is a dict with the ``name`` of a value, its
``kind`` (of torch's ``WriteItemType``), its path in the state (``keys``), and its place: ``file``, ``start`` and
``nbytes``. Of a chunk of a tensor it also has ``dtype``, ``shape``, ``offsets`` and ``sizes``.

:func:`seal` writes the last files of a draft; :func:`require_stored` checks an item before torch unpacks it.
"""

from __future__ import annotations

import io
import json
import math
import pickle
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # where an item lies in torch's files
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import WriteItemType

from hwrl.checkpoint.durable import DurableFS
from hwrl.checkpoint.manifest import EXTRA_NAME, LAYOUT_NAME, MANIFEST_NAME, Manifest

Json = dict[str, Any]
StatePath = tuple[str | int, ...]
"""The path to a value in a nested state: dict keys and list positions. torch calls it ``OBJ_PATH``."""


def write_torch_metadata(fs: DurableFS, directory: Path, entries: Sequence[Json]) -> None:
    """Write torch's own ``.metadata`` for these entries, so that torch's tools can read the checkpoint.

    Raises ValueError if the chunks of a tensor overlap or do not cover it.
    """
    state, storage = build_metadata_tables(entries, all_chunks=True)
    state_paths = {entry["name"]: state_path_of(entry) for entry in entries}
    metadata = Metadata(state, planner_data=state_paths, storage_data=storage, storage_meta=StorageMeta())
    fs.write_file(directory / ".metadata", pickle.dumps(metadata))


def state_path_of(entry: Json) -> StatePath:
    """Return the path of an entry in the nested state. Raise ValueError if it has other things than keys."""
    state_path = tuple(entry["keys"])
    if [key for key in state_path if not isinstance(key, str | int)]:
        raise ValueError(f"{state_path!r} is not a path of strings and integers")
    return state_path


def build_metadata_tables(
    entries: Iterable[Json], *, all_chunks: bool
) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
    """Return the two tables of torch's ``Metadata``: the description of each name, and the place of each item.

    Raises ValueError if the entries are malformed, or if the chunks of a tensor overlap or lie outside it. With
    ``all_chunks``, also raises it if the chunks do not cover the tensor. If several entries have the name of one
    non-tensor value, the last one counts.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for entry in entries:
        name, chunk = entry["name"], None
        described: Any = BytesStorageMetadata()
        if not isinstance(name, str):
            raise ValueError(f"{name!r} is not a name")
        if WriteItemType[entry["kind"]] is not WriteItemType.BYTE_IO:
            dtype = getattr(torch, entry["dtype"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{entry['dtype']!r} is not a dtype of torch")
            chunk = ChunkStorageMetadata(torch.Size(entry["offsets"]), torch.Size(entry["sizes"]))
            if math.prod(chunk.sizes) * dtype.itemsize > entry["nbytes"]:
                raise ValueError(f"{name!r} needs more than its {entry['nbytes']:,} bytes")
            described = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(entry["shape"]), [])
        index = MetadataIndex(name, None if chunk is None else chunk.offsets)
        storage[index] = StorageInfo(entry["file"], entry["start"], entry["nbytes"])
        known = state.setdefault(name, described)
        if known is not described and (first := describe_saved(known)) != (this := describe_saved(described)):
            raise ValueError(f"{name!r} is {first} in one entry and {this} in another")
        if chunk is not None:
            known.chunks.append(chunk)
    for name, described in state.items():
        if isinstance(described, TensorStorageMetadata) and not _fit(described, all_chunks=all_chunks):
            raise ValueError(f"the chunks of {name!r} overlap or do not cover the tensor exactly, or lie outside it")
    return state, storage


def describe_saved(value: Any) -> str:
    """Return dtype and shape of a saved value as text, from torch's metadata."""
    if isinstance(value, BytesStorageMetadata):
        return "not a tensor"
    return f"{value.properties.dtype} {list(value.size)}"


def _fit(described: TensorStorageMetadata, *, all_chunks: bool) -> bool:
    """Return whether the chunks lie in the tensor and do not overlap and, with ``all_chunks``, cover it."""
    chunks, size = described.chunks, described.size
    ranges = [bounds for chunk in chunks for bounds in zip(chunk.offsets, chunk.sizes, size, strict=True)]
    if not all(0 <= begin <= begin + length <= whole for begin, length, whole in ranges):
        return False
    covered = not all_chunks or sum([math.prod(chunk.sizes) for chunk in chunks]) == math.prod(size)
    return covered and (len(chunks) == 1 or are_disjoint(chunks))


def are_disjoint(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether no two chunks share an element.

    Sort the chunks by their begin along the axis with the most distinct begins. Chunk i can overlap only later chunks
    that begin before i ends. Pass k compares all such pairs (i, i+k) at once; stop at the first pass without pairs.
    Memory is linear in the number of chunks. If the tensor is divided along this axis only, one pass is enough.
    """
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2 or not filled[0].sizes:
        return len(filled) < 2  # a tensor without axes has one element, so two chunks share it
    begins = np.array([tuple(chunk.offsets) for chunk in filled])
    ends = begins + [tuple(chunk.sizes) for chunk in filled]
    axis = max(range(begins.shape[1]), key=lambda axis: len(np.unique(begins[:, axis])))
    order = begins[:, axis].argsort()
    begins, ends = begins[order], ends[order]
    reach = begins[:, axis].searchsorted(ends[:, axis])
    for shift in range(1, len(filled)):
        these = (reach > np.arange(shift, len(filled) + shift)).nonzero()[0]
        if not len(these):
            break
        those = these + shift
        if ((begins[these] < ends[those]) & (begins[those] < ends[these])).all(-1).any():
            return False
    return True


# -- files ----------------------------------------------------------------------------------------------------------


def seal(fs: DurableFS, draft: Path, entries: Sequence[Json], extra: Json, manifest: Manifest) -> Manifest:
    """Add layout, extra state and manifest to a draft. Return the manifest as it was written.

    ``manifest`` lists the tensor files in the draft; this adds the other files that ``fs`` wrote or adopted there. When
    this returns, every file in the draft and its name in the draft are durable. Raises ValueError or TypeError if the
    result could not be resumed.
    """
    if manifest.nodes == 1:
        write_torch_metadata(fs, draft, entries)
    else:  # with a .metadata, torch's tools would take one node's part for the whole checkpoint
        build_metadata_tables(entries, all_chunks=False)
    for name, content in {LAYOUT_NAME: entries, EXTRA_NAME: extra}.items():
        fs.write_file(draft / name, json.dumps(content).encode())
    manifest = replace(manifest, files={**manifest.files, **fs.take_records(draft)})
    manifest_content = manifest.to_bytes()
    Manifest.from_bytes(manifest_content)  # raises if the manifest could not be read again
    fs.write_file(draft / MANIFEST_NAME, manifest_content)
    fs.take_records(draft)  # forget the manifest's own record
    for directory in [path for path in draft.rglob("*") if path.is_dir()] + [draft]:
        fs.sync_directory(directory)
    return manifest


def require_stored(data: bytes) -> None:
    """Raise ValueError unless ``data`` is an uncompressed archive.

    torch writes uncompressed records only, but its reader also accepts compressed ones. A forged megabyte could then
    unpack to gigabytes.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, OSError) as exc:
        raise ValueError(f"it has an archive that torch.save did not write: {exc}") from exc
    if min((record.header_offset for record in records), default=0) != 0 or archive.comment:
        # Different readers look for the archive's table of contents in different places of such a file.
        raise ValueError("it has an archive with extra bytes before or after its content")
    unpacked = sum(record.file_size for record in records)
    if unpacked > len(data) or any(record.compress_type != zipfile.ZIP_STORED for record in records):
        raise ValueError(
            f"an archive of {len(data):,} bytes in it would unpack to {unpacked:,} bytes; hwrl does not compress"
        )
