"""The layout of a checkpoint: the place of each part of each tensor. It is JSON, so no pickle is sent or executed."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # where an item lies in torch's files
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from hwrl.checkpoint.directory.durable import DurableFS

Json = dict[str, Any]
Keys = tuple[str | int, ...]
"""The path of a value in a nested state: dict keys and list positions."""


# -- plans ----------------------------------------------------------------------------------------------------------


def encode_items(items: Iterable[WriteItem]) -> list[Json]:
    """Return the items of a save plan as JSON."""
    return [_encode_item(item) for item in items]


def decode_plan(items: Iterable[Json]) -> SavePlan:
    """Return the save plan with the items from :func:`encode_items`."""
    return SavePlan([_decode_item(item) for item in items])


def _encode_item(item: WriteItem) -> Json:
    data = item.tensor_data
    if data is None:
        return {"name": item.index.fqn, "kind": item.type.name}
    return {
        "name": item.index.fqn,
        "kind": item.type.name,
        "dtype": str(data.properties.dtype).removeprefix("torch."),
        "shape": list(data.size),
        "offsets": list(data.chunk.offsets),
        "sizes": list(data.chunk.sizes),
    }


def _decode_item(item: Json) -> WriteItem:
    kind = WriteItemType[item["kind"]]
    if kind is WriteItemType.BYTE_IO:
        return WriteItem(MetadataIndex(item["name"]), kind)
    dtype = getattr(torch, item["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{item['dtype']!r} is no dtype")
    chunk = ChunkStorageMetadata(torch.Size(item["offsets"]), torch.Size(item["sizes"]))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(item["shape"]))
    return WriteItem(MetadataIndex(item["name"], chunk.offsets), kind, tensor_data=data)


# -- entries of the layout file -------------------------------------------------------------------------------------


def encode_entry(item: WriteItem, *, keys: Keys, file: str, start: int, nbytes: int) -> Json:
    """Return one entry of the layout file: an item, its path in the state, and its bytes in a file."""
    return {**_encode_item(item), "keys": list(keys), "file": file, "start": start, "nbytes": nbytes}


def write_torch_metadata(fs: DurableFS, directory: Path, entries: Sequence[Json]) -> None:
    """Write torch's own ``.metadata`` of a checkpoint with these entries, for torch's tools.

    Raises ValueError if the parts of a tensor do not make up the whole.
    """
    state, _ = read_layout(entries, whole=True)
    keys = {entry["name"]: keys_of(entry) for entry in entries}
    writer = FileSystemWriter(directory, sync_files=False)  # DurableFS syncs, after it has flushed
    writer.fs = _ThroughDurableFS(fs)
    writer.finish(Metadata(state, planner_data=keys), [[_write_result(entry) for entry in entries]])


class _ThroughDurableFS(FileSystem):
    """The file system of torch's writer: it creates and renames through a :class:`DurableFS`."""

    def __init__(self, fs: DurableFS) -> None:
        self._fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open ``path``. A written file is durable when the context ends without an error."""
        with self._fs.create_stream(path, mode) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        self._fs.rename(path, new_path)


def require_readable(entries: Iterable[Json]) -> None:
    """Raise ValueError if one node's part of a checkpoint, with these entries, could not be read."""
    read_layout(entries, whole=False)


def keys_of(entry: Json) -> Keys:
    """Return the path of an entry in the nested state; ValueError if it is none."""
    keys = tuple(entry["keys"])
    if not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"{keys!r} are no keys")
    return keys


def read_layout(entries: Iterable[Json], *, whole: bool) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
    """Return the two tables of torch's metadata: a description of each name, and the storage of each item.

    Raises ValueError if the entries make no sense; with ``whole``, also if a tensor lacks elements.
    """
    state: dict[str, Any] = {}
    storage: dict[MetadataIndex, Any] = {}
    for entry in entries:
        item = _decode_item(entry)
        data = item.tensor_data
        if data is not None and math.prod(data.chunk.sizes) * data.properties.dtype.itemsize > entry["nbytes"]:
            raise ValueError(f"{entry['name']!r} has no room in its {entry['nbytes']:,} bytes")
        storage[item.index] = _storage_info(entry)
        _add_chunk(state, item)
    for name, described in state.items():
        if isinstance(described, TensorStorageMetadata):
            _check_chunks(name, described, whole=whole)
    return state, storage


def describe_saved(value: Any) -> str:
    """Return dtype and shape of a saved value, from torch's metadata."""
    if isinstance(value, BytesStorageMetadata):
        return "no tensor"
    return f"{value.properties.dtype} {list(value.size)}"


def _write_result(entry: Json) -> WriteResult:
    """Return the result of torch's writer for ``entry``."""
    return WriteResult(_decode_item(entry).index, size_in_bytes=entry["nbytes"], storage_data=_storage_info(entry))


def _storage_info(entry: Json) -> StorageInfo:
    return StorageInfo(entry["file"], entry["start"], entry["nbytes"])


def _add_chunk(state: dict[str, Any], item: WriteItem) -> None:
    name, data = item.index.fqn, item.tensor_data
    described = BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
    entry = state.setdefault(name, described)
    if (first := describe_saved(entry)) != (this := describe_saved(described)):
        raise ValueError(f"{name!r} is {first} in one part and {this} in another")
    if data is not None:
        entry.chunks.append(data.chunk)


def _check_chunks(name: str, entry: TensorStorageMetadata, *, whole: bool) -> None:
    """Refuse a tensor with an element in two chunks or, if it is ``whole``, in none."""
    chunks, size = entry.chunks, entry.size
    inside = all(
        0 <= begin <= begin + length <= limit
        for chunk in chunks
        for begin, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )
    complete = not whole or sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)
    if not (inside and complete and (len(chunks) == 1 or are_apart(chunks))):
        raise ValueError(f"the parts of {name!r} do not make up the whole")


def are_apart(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether no two chunks share an element.

    The chunks are sorted along one axis. Each is compared with the next one, then with the one after, until none
    reaches so far. Memory is linear in the number of chunks; so is time, for a tensor divided along this axis only.
    """
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2 or not filled[0].sizes:
        return len(filled) < 2  # a tensor without axes is one element
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
