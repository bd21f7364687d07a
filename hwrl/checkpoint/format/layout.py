"""Which tensor lies where: torch's save and load plans as plain JSON, so that no pickle is sent or executed."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import math
import operator
import re
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # what torch's files are made of
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from hwrl.checkpoint.directory.durable import DurableFS
from hwrl.checkpoint.format.archive import require_stored
from hwrl.checkpoint.format.manifest import LAYOUT_NAME, MALFORMED, CheckpointInfo, Manifest, corrupt
from hwrl.checkpoint.format.shards import local_parts
from hwrl.errors import CheckpointCorruptError, CheckpointError, CheckpointSaveError

Json = dict[str, Any]
Keys = tuple[str | int, ...]
"""Where a nested state has a value: the keys and list positions that lead to it."""


def encode_plan(plan: SavePlan) -> list[Json]:
    """Return a local save plan as JSON."""
    return [_encode_item(item) for item in plan.items]


def decode_plan(data: Iterable[Json]) -> SavePlan:
    """Return the save plan that :func:`encode_plan` wrote."""
    return SavePlan([_decode_item(item) for item in data])


def encode_entry(item: WriteItem, *, keys: Keys, file: str, start: int, nbytes: int) -> Json:
    """Return one line of the layout file: an item, where the state has it, and where it was written."""
    return {**_encode_item(item), "keys": list(keys), "file": file, "start": start, "nbytes": nbytes}


def write_torch_metadata(fs: DurableFS, directory: Path, entries: Sequence[Json]) -> None:
    """Write torch's own ``.metadata`` of a checkpoint that has these lines, for torch's tools.

    Raises ValueError if the parts of a tensor do not make up the whole.
    """
    state, _ = _collect(entries, whole=True)
    keys = {entry["name"]: _keys(entry) for entry in entries}
    writer = FileSystemWriter(directory, sync_files=False)  # DurableFS syncs, after it flushed
    writer.fs = fs
    writer.finish(Metadata(state, planner_data=keys), [[_decode_result(entry) for entry in entries]])


def require_readable(entries: Iterable[Json]) -> None:
    """Raise ValueError if a node's part of a checkpoint, which has these lines, could not be read again."""
    _collect(entries, whole=False)


def _decode_result(entry: Json) -> WriteResult:
    """Return what torch's writer would have said when it wrote ``entry``."""
    return WriteResult(_decode_item(entry).index, size_in_bytes=entry["nbytes"], storage_data=_place_of(entry))


def _place_of(entry: Json) -> StorageInfo:
    return StorageInfo(entry["file"], entry["start"], entry["nbytes"])


def _keys(entry: Json) -> Keys:
    keys = tuple(entry["keys"])
    if not all(isinstance(key, str | int) for key in keys):
        raise ValueError(f"{keys!r} are no keys")
    return keys


def _collect(entries: Iterable[Json], *, whole: bool) -> tuple[dict[str, Any], dict[MetadataIndex, Any]]:
    """Return what torch's metadata says: what each entry of the state is, and where each of its parts lies."""
    state: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for entry in entries:
        item = _decode_item(entry)
        data = item.tensor_data
        if data is not None and math.prod(data.chunk.sizes) * data.properties.dtype.itemsize > entry["nbytes"]:
            raise ValueError(f"{entry['name']!r} has no room in its {entry['nbytes']:,} bytes")
        places[item.index] = _place_of(entry)
        _add_chunk(state, item)
    for name, described in state.items():
        if isinstance(described, TensorStorageMetadata):
            _check_chunks(name, described, whole=whole)
    return state, places


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


@contextlib.contextmanager
def distinct_names(error: type[CheckpointError]) -> Iterator[None]:
    """Raise ``error`` for what torch raises while it flattens a state of which two values have one name."""
    try:
        yield
    except ValueError as exc:
        raise error(
            "the state has two values of one name",
            why=str(exc),
            fix='rename one of them: {"a": {"b": …}} and {"a.b": …} are the same in a checkpoint',
        ) from exc


class SafeSavePlanner(DefaultSavePlanner):
    """torch's planner, which refuses what could not be read again without executing a pickle."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)  # a pass over the state for torch's older ShardedTensors

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor as it is, anything else as bytes that ``torch.load(weights_only=True)`` reads."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        try:
            data = super().transform_object(write_item, object)
            data.seek(0)
            torch.load(data, map_location="cpu", weights_only=True)
        except Exception as exc:  # torch raises whatever a foreign class, or its bytes, lead to
            raise _no_plain_value(write_item.index.fqn, object, exc) from exc
        data.seek(0)
        return data


def _no_plain_value(name: str, value: object, exc: Exception) -> CheckpointSaveError:
    inside = re.findall(r"(?:GLOBAL |<class '|<function )([\w.<>]+)", str(exc))[:1]
    return CheckpointSaveError(
        f"state {name!r} cannot be saved",
        why=" of ".join([f"this {type(value).__name__} could be loaded only by executing a pickle", *inside]),
        fix="save tensors, numbers, strings, and dicts, lists and tuples of them",
    )


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's planner, which loads no pickle and refuses a state that the checkpoint does not fill."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. Nothing has been loaded then.

        Raises CheckpointError if names, shapes or dtypes differ, or if another node's disk has what is needed.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        _check_same(self.state_dict, self.metadata.state_dict_metadata)
        plan = super().create_local_plan()
        missing = Counter({name: tensor.numel() for (name, _), tensor in local_parts(self.state_dict)})
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                missing[item.dest_index.fqn] -= math.prod(item.lengths)
        elsewhere = sorted(name for name, numel in missing.items() if numel > 0)
        if elsewhere:
            raise _elsewhere(self._manifest, elsewhere)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into the state."""
        fqn = read_item.dest_index.fqn
        *parents, last = self.mappings[fqn]
        target: Any = self.original_state_dict
        for part in parents:
            target = target[_own_key(target, part)]
        target[_own_key(target, last)] = torch.load(value, map_location="cpu", weights_only=True)


def _own_key(target: Any, key: str | int) -> Any:
    """Return the key, or list position, of ``target`` that torch calls ``key``: it makes strings of keys."""
    return next(own for own in target if str(own) == key) if isinstance(target, dict) else key


def _check_same(wanted: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = sorted(wanted.keys() - saved.keys())
    if missing:
        raise _misfit(f"it lacks {len(missing)} entries, among them {missing[0]!r}")
    for name, target in wanted.items():
        if (here := _describe(target)) != (there := _describe_saved(saved[name])):
            raise _misfit(f"{name!r} is {there} in the checkpoint and {here} here")


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{value.dtype} {list(value.shape)}" + ("" if value.layout is torch.strided else f" {value.layout}")


def _describe_saved(value: Any) -> str:
    if isinstance(value, BytesStorageMetadata):
        return "no tensor"
    return f"{value.properties.dtype} {list(value.size)}"


def _misfit(why: str) -> CheckpointError:
    return CheckpointError(
        "the checkpoint does not fit the state that it is to be loaded into",
        why=why,
        fix="build the same model and optimizer as the run that saved it, or start in an empty directory",
    )


def _elsewhere(manifest: Manifest, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"step {manifest.step} cannot be loaded on {socket.gethostname()}: this disk lacks parts of {names[0]!r}",
        why=f"it has the part that node {manifest.node} of {manifest.nodes} saved, and this rank needs parts of "
        f"{len(names)} tensors that other nodes saved",
        fix="start as many ranks on the same nodes, in the same order; or put the parts of all nodes together with "
        "`hwrl checkpoints join`, and give all ranks the result",
    )


class LayoutReader(FileSystemReader):
    """Reads a checkpoint's tensors by its layout file; torch's own ``.metadata``, a pickle, is never opened."""

    def __init__(self, info: CheckpointInfo) -> None:
        super().__init__(info.path)
        self._info = info

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata, built from the layout file; CheckpointCorruptError if that says nonsense."""
        try:
            entries = json.loads((Path(self._info.path) / LAYOUT_NAME).read_bytes())
            return self._build(entries)
        except CheckpointCorruptError:
            raise
        except MALFORMED as exc:
            raise corrupt(self._info.path, f"{LAYOUT_NAME} cannot be read: {exc}") from exc

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load ``plan``; ValueError if a part of it would unpack to more than it has on disk."""
        places = {(at.relative_path, at.offset, at.length) for at in map(self._storage_of, plan.items)}
        for name, of_file in itertools.groupby(sorted(places), key=operator.itemgetter(0)):
            with (Path(self._info.path) / name).open("rb") as file:
                for _, start, nbytes in of_file:
                    require_stored(file, start=start, nbytes=nbytes)
        return super().read_data(plan, planner)

    def _storage_of(self, item: ReadItem) -> StorageInfo:
        place: StorageInfo = self.storage_data[item.storage_index]
        return place

    def _build(self, entries: Sequence[Json]) -> Metadata:
        used: Counter[str] = Counter()
        for entry in entries:
            self._check_place(entry)
            used[entry["file"]] += entry["nbytes"]
        state, places = _collect(entries, whole=self._info.manifest.nodes == 1)
        for name, nbytes in used.items():  # or a few bytes would be said to be many tensors
            if nbytes > self._info.manifest.files[name].nbytes:
                raise corrupt(self._info.path, f"{LAYOUT_NAME} has {nbytes:,} bytes in {name}, which are not there")
        return Metadata(state, storage_data=places, storage_meta=StorageMeta(load_id=self.load_id))

    def _check_place(self, entry: Json) -> None:
        _keys(entry)
        record = self._info.manifest.files.get(entry["file"])
        if record is None:
            raise corrupt(self._info.path, f"{LAYOUT_NAME} names {entry['file']!r}, which the manifest does not")
        if entry["start"] < 0 or entry["nbytes"] < 0 or entry["start"] + entry["nbytes"] > record.nbytes:
            raise corrupt(self._info.path, f"{entry['name']!r} lies outside {entry['file']}")


def read_entries(info: CheckpointInfo) -> list[Json]:
    """Return the lines of the layout file; CheckpointCorruptError if they make no sense."""
    LayoutReader(info).read_metadata()
    return [dict(entry) for entry in json.loads((info.path / LAYOUT_NAME).read_bytes())]


def _add_chunk(state: dict[str, Any], item: WriteItem) -> None:
    name, data = item.index.fqn, item.tensor_data
    described = BytesStorageMetadata() if data is None else TensorStorageMetadata(data.properties, data.size, [])
    entry = state.setdefault(name, described)
    if (there := _describe_saved(entry)) != (here := _describe_saved(described)):
        raise ValueError(f"{name!r} is {there} in one part and {here} in another")
    if data is not None:
        entry.chunks.append(data.chunk)


def _check_chunks(name: str, entry: TensorStorageMetadata, *, whole: bool) -> None:
    """Refuse a tensor of which an element lies in two chunks, or, of a ``whole`` one, in none: it would not be read."""
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

    Sorted along one axis, each is compared with the next, then with the next but one, as long as any reaches so far.
    Memory is linear in the number of chunks; time, too, for what is divided along that axis only.
    """
    filled = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    if len(filled) < 2 or not filled[0].sizes:
        return len(filled) < 2  # what has no axis is one element
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


def read_tensors(info: CheckpointInfo, *, prefix: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors whose names begin with ``prefix``, without it, on the host; whoever sharded them.

    Hashes are not verified here. Raises CheckpointCorruptError if the bytes cannot be read.
    """
    reader = LayoutReader(info)
    saved = reader.read_metadata()
    entries = {
        name: entry
        for name, entry in saved.state_dict_metadata.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    tensors = {name: torch.empty(entry.size, dtype=entry.properties.dtype) for name, entry in entries.items()}
    metadata = Metadata(dict(entries), storage_data=saved.storage_data, storage_meta=saved.storage_meta)
    load = StateLoad(info, reader)
    load.plan(dict(tensors), metadata)
    load.run()
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class StateLoad:
    """Fills a state in place, in two steps: what is wrong with the state shows in the first, which loads nothing."""

    def __init__(self, info: CheckpointInfo, reader: LayoutReader) -> None:
        self._info, self._reader = info, reader
        self._planner = SafeLoadPlanner(info.manifest)

    def plan(self, state: dict[str, Any], metadata: Metadata) -> list[str]:
        """Return the names in ``metadata`` that ``state`` has not; CheckpointError if what it has is not as there."""
        with distinct_names(CheckpointError):
            self._planner.set_up_planner(state, metadata, is_coordinator=True)
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(self._planner.create_local_plan())
        self._plan = self._planner.finish_plan(plan)
        return sorted(metadata.state_dict_metadata.keys() - self._planner.state_dict.keys())

    def run(self) -> None:
        """Load what was planned; CheckpointCorruptError if the bytes are not what the layout says."""
        try:
            self._reader.read_data(self._plan, self._planner).wait()
        except Exception as exc:  # torch raises whatever forged bytes lead to
            raise corrupt(self._info.path, f"its data cannot be read: {exc}") from exc


def require_all_wanted(offers: Sequence[tuple[int, list[str]]]) -> None:
    """Raise CheckpointError if a node's checkpoint has a name that none of its ranks' states has.

    ``offers`` has each rank's node, and what :meth:`StateLoad.plan` returned there: ranks may have names of their own.
    """
    for node in {node for node, _ in offers}:
        unknown = sorted(set[str].intersection(*(set(names) for other, names in offers if other == node)))
        if unknown:
            raise _misfit(f"it has {len(unknown)} more entries, among them {unknown[0]!r}")
