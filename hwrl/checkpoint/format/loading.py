"""Loading a checkpoint by its layout: :func:`plan_load`, :class:`SavedTensors` and :func:`read_tensors`."""

from __future__ import annotations

import itertools
import json
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo  # where an item lies in torch's files
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hwrl.checkpoint.format.archive import require_stored
from hwrl.checkpoint.format.layout import Json, keys_of, read_layout
from hwrl.checkpoint.format.manifest import LAYOUT_NAME, MALFORMED, CheckpointInfo, corrupt_error
from hwrl.checkpoint.format.planners import SafeLoadPlanner, distinct_names, misfit_error
from hwrl.errors import CheckpointCorruptError, CheckpointError


class LayoutReader(FileSystemReader):
    """torch's reader, by the layout file. It never opens torch's own ``.metadata``, a pickle.

    ``entries`` are the layout of a draft, which has no layout file yet.
    """

    def __init__(self, info: CheckpointInfo, entries: Sequence[Json] | None = None) -> None:
        super().__init__(info.path)
        self._info, self._entries = info, entries

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return torch's metadata, built from the layout file; CheckpointCorruptError if the file makes no sense."""
        try:
            if self._entries is not None:
                return self._build(self._entries)
            return self._build(json.loads((Path(self._info.path) / LAYOUT_NAME).read_bytes()))
        except CheckpointCorruptError:
            raise
        except MALFORMED as exc:
            raise corrupt_error(self._info.path, f"{LAYOUT_NAME} cannot be read: {exc}") from exc

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load ``plan``; ValueError if an item would unpack to more bytes than it has on the disk."""
        ranges = {(at.relative_path, at.offset, at.length) for at in map(self._storage_of, plan.items)}
        for name, in_file in itertools.groupby(sorted(ranges), key=operator.itemgetter(0)):
            with (Path(self._info.path) / name).open("rb") as file:
                for _, start, nbytes in in_file:
                    require_stored(file, start=start, nbytes=nbytes)
        return super().read_data(plan, planner)

    def _storage_of(self, item: ReadItem) -> StorageInfo:
        info: StorageInfo = self.storage_data[item.storage_index]
        return info

    def _build(self, entries: Sequence[Json]) -> Metadata:
        used: Counter[str] = Counter()
        for entry in entries:
            self._check_range(entry)
            used[entry["file"]] += entry["nbytes"]
        state, storage = read_layout(entries, whole=self._info.manifest.nodes == 1)
        for name, nbytes in used.items():  # a forger may claim that a few bytes are many tensors
            if nbytes > self._info.manifest.files[name].nbytes:
                why = f"{LAYOUT_NAME} has {nbytes:,} bytes in {name}, which are not there"
                raise corrupt_error(self._info.path, why)
        return Metadata(state, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    def _check_range(self, entry: Json) -> None:
        keys_of(entry)
        record = self._info.manifest.files.get(entry["file"])
        if record is None:
            raise corrupt_error(self._info.path, f"{LAYOUT_NAME} names {entry['file']!r}, which the manifest does not")
        if entry["start"] < 0 or entry["nbytes"] < 0 or entry["start"] + entry["nbytes"] > record.nbytes:
            raise corrupt_error(self._info.path, f"{entry['name']!r} lies outside {entry['file']}")


@dataclass(frozen=True)
class PlannedLoad:
    """A load into a fitting state. ``unwanted`` are names in the checkpoint, but not in the state."""

    info: CheckpointInfo
    reader: LayoutReader
    planner: SafeLoadPlanner
    plan: LoadPlan
    unwanted: list[str]

    def run(self) -> None:
        """Fill the state in place; CheckpointCorruptError if the bytes contradict the layout."""
        try:
            self.reader.read_data(self.plan, self.planner).wait()
        except Exception as exc:  # forged bytes may raise any error
            raise corrupt_error(self.info.path, f"its data cannot be read: {exc}") from exc


def plan_load(info: CheckpointInfo, reader: LayoutReader, metadata: Metadata, state: dict[str, Any]) -> PlannedLoad:
    """Plan to load the values in ``metadata`` into ``state``. Nothing is loaded yet.

    Raises CheckpointError if a value of ``state`` differs from the checkpoint.
    """
    planner = SafeLoadPlanner(info.manifest)
    with distinct_names(CheckpointError):
        planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    unwanted = sorted(metadata.state_dict_metadata.keys() - planner.state_dict.keys())
    return PlannedLoad(info, reader, planner, plan, unwanted)


def require_all_wanted(unwanted: Sequence[tuple[int, list[str]]]) -> None:
    """Raise CheckpointError if no rank of a node wants a name in the node's checkpoint.

    ``unwanted`` has the node of each rank, and the names missing in the rank's state. Ranks may have different names.
    """
    for node in {node for node, _ in unwanted}:
        unknown = sorted(set[str].intersection(*(set(names) for other, names in unwanted if other == node)))
        if unknown:
            raise misfit_error(f"it has {len(unknown)} more entries, among them {unknown[0]!r}")


def read_entries(info: CheckpointInfo) -> list[Json]:
    """Return the entries of the layout file; CheckpointCorruptError if they make no sense."""
    LayoutReader(info).read_metadata()
    return [dict(entry) for entry in json.loads((info.path / LAYOUT_NAME).read_bytes())]


def read_tensors(info: CheckpointInfo, *, prefix: str) -> dict[str, torch.Tensor]:
    """Return the whole tensors with names beginning with ``prefix``, on the host, however they were sharded.

    The prefix is cut off. Hashes are not verified. Raises CheckpointCorruptError if the bytes cannot be read.
    """
    saved = SavedTensors(info)
    tensors = saved.read(name for name in saved if name.startswith(prefix))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class SavedTensors(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint by their flat names, such as ``model.weight``, whole however they were sharded.

    A lookup reads one tensor from the files into new host memory, which is the caller's. So a caller that takes one
    tensor at a time needs memory for one. Hashes are not verified. Lookups raise KeyError for an unknown name,
    CheckpointCorruptError if the bytes cannot be read, and CheckpointError if other nodes' disks have parts of it.
    """

    def __init__(self, info: CheckpointInfo, entries: Sequence[Json] | None = None) -> None:
        self.info, self._reader = info, LayoutReader(info, entries)
        self._saved = self._reader.read_metadata()
        described = self._saved.state_dict_metadata.items()
        self._described = {name: one for name, one in described if isinstance(one, TensorStorageMetadata)}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Return the tensors ``names``, read together."""
        entries = {name: self._described[name] for name in names}
        tensors = {name: torch.empty(one.size, dtype=one.properties.dtype) for name, one in entries.items()}
        metadata = Metadata(dict(entries), storage_data=self._saved.storage_data, storage_meta=self._saved.storage_meta)
        plan_load(self.info, self._reader, metadata, dict(tensors)).run()
        return tensors

    def on_meta(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device, with the shape and dtype of ``name``; nothing is read."""
        described = self._described[name]
        return torch.empty(described.size, dtype=described.properties.dtype, device="meta")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._described  # Mapping's own reads the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)
