"""The layout of a checkpoint: where each item lies in which file.

An item is torch's ``WriteItem``: one chunk of a tensor (a rectangle of its elements), or one non-tensor value. The
layout is JSON, so no pickle is sent between ranks or executed.
"""

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

from hwrl.checkpoint.durable import DurableFS

Json = dict[str, Any]
StatePath = tuple[str | int, ...]
"""The path to a value in a nested state: dict keys and list positions. torch calls it ``OBJ_PATH``."""


# -- plans ----------------------------------------------------------------------------------------------------------


def encode_items(items: Iterable[WriteItem]) -> list[Json]:
    """Return the items of a save plan as JSON."""
    return [_encode_item(item) for item in items]


def decode_plan(items: Iterable[Json]) -> SavePlan:
    """Return a save plan with the items that :func:`encode_items` encoded."""
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
    if not isinstance(item["name"], str):
        raise ValueError(f"{item['name']!r} is not a name")
    if kind is WriteItemType.BYTE_IO:
        return WriteItem(MetadataIndex(item["name"]), kind)
    dtype = getattr(torch, item["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{item['dtype']!r} is not a dtype of torch")
    chunk = ChunkStorageMetadata(torch.Size(item["offsets"]), torch.Size(item["sizes"]))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(item["shape"]))
    return WriteItem(MetadataIndex(item["name"], chunk.offsets), kind, tensor_data=data)


# -- entries of the layout file -------------------------------------------------------------------------------------


def encode_entry(item: WriteItem, *, state_path: StatePath, file: str, start: int, nbytes: int) -> Json:
    """Return one entry of the layout file: an item, its path in the state, and its byte range in a file."""
    return {**_encode_item(item), "keys": list(state_path), "file": file, "start": start, "nbytes": nbytes}


def write_torch_metadata(fs: DurableFS, directory: Path, entries: Sequence[Json]) -> None:
    """Write torch's own ``.metadata`` for these entries, so that torch's tools can read the checkpoint.

    Raises ValueError if the chunks of a tensor overlap or do not cover it.
    """
    state, _ = build_metadata_tables(entries, all_chunks=True)
    state_paths = {entry["name"]: state_path_of(entry) for entry in entries}
    writer = FileSystemWriter(directory, sync_files=False)  # DurableFS syncs, after it has flushed
    writer.fs = _ThroughDurableFS(fs)
    writer.finish(Metadata(state, planner_data=state_paths), [[_write_result(entry) for entry in entries]])


class _ThroughDurableFS(FileSystem):
    """A file system for torch's writer. It creates and renames files through a :class:`DurableFS`."""

    def __init__(self, fs: DurableFS) -> None:
        self._fs = fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open ``path``, as :meth:`DurableFS.create_stream` does."""
        with self._fs.create_stream(path, mode) as stream:
            yield stream

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file."""
        self._fs.rename(path, new_path)


def require_readable(entries: Iterable[Json]) -> None:
    """Raise ValueError if these entries of one node's part could not be read. The part need not cover the tensors."""
    build_metadata_tables(entries, all_chunks=False)


def state_path_of(entry: Json) -> StatePath:
    """Return the path of an entry in the nested state. Raise ValueError if it has other things than keys."""
    state_path = tuple(entry["keys"])
    if not all(isinstance(key, str | int) for key in state_path):
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
        item = _decode_item(entry)
        data = item.tensor_data
        if data is not None and math.prod(data.chunk.sizes) * data.properties.dtype.itemsize > entry["nbytes"]:
            raise ValueError(f"{entry['name']!r} needs more than its {entry['nbytes']:,} bytes")
        storage[item.index] = _storage_info(entry)
        _add_chunk(state, item)
    for name, described in state.items():
        if isinstance(described, TensorStorageMetadata):
            _check_chunks(name, described, all_chunks=all_chunks)
    return state, storage


def describe_saved(value: Any) -> str:
    """Return dtype and shape of a saved value as text, from torch's metadata."""
    if isinstance(value, BytesStorageMetadata):
        return "not a tensor"
    return f"{value.properties.dtype} {list(value.size)}"


def _write_result(entry: Json) -> WriteResult:
    """Return the result that torch's writer would return after writing ``entry``."""
    return WriteResult(_decode_item(entry).index, size_in_bytes=entry["nbytes"], storage_data=_storage_info(entry))


def _storage_info(entry: Json) -> StorageInfo:
    return StorageInfo(entry["file"], entry["start"], entry["nbytes"])


def _add_chunk(state: dict[str, Any], item: WriteItem) -> None:
    name, data = item.index.fqn, item.tensor_data
    described = BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
    known = state.setdefault(name, described)
    if (first := describe_saved(known)) != (this := describe_saved(described)):
        raise ValueError(f"{name!r} is {first} in one entry and {this} in another")
    if data is not None:
        known.chunks.append(data.chunk)


def _check_chunks(name: str, described: TensorStorageMetadata, *, all_chunks: bool) -> None:
    """Raise ValueError if a chunk lies outside the tensor, or chunks overlap. ``all_chunks`` must also cover it."""
    chunks, size = described.chunks, described.size
    inside = all(
        0 <= begin <= begin + length <= limit
        for chunk in chunks
        for begin, length, limit in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )
    covered = not all_chunks or sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)
    if not (inside and covered and (len(chunks) == 1 or are_disjoint(chunks))):
        raise ValueError(f"the chunks of {name!r} overlap or do not cover the tensor exactly, or lie outside it")


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
