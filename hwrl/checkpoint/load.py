"""Load a checkpoint with the help of its layout: :func:`plan_load`, :class:`SavedTensors`, :func:`read_tensors`."""

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

from hwrl.checkpoint.archive import require_stored
from hwrl.checkpoint.layout import Json, build_metadata_tables, state_path_of
from hwrl.checkpoint.manifest import LAYOUT_NAME, MALFORMED, MAX_JSON_NBYTES, CheckpointInfo, corrupt_error
from hwrl.checkpoint.planners import SafeLoadPlanner, duplicate_names_as, misfit_error
from hwrl.errors import CheckpointCorruptError, CheckpointError
from hwrl.files import open_to_read, read_file


class LayoutReader(FileSystemReader):
    """torch's storage reader, but it reads the layout file. It never opens torch's own ``.metadata``, a pickle.

    A draft has no layout file yet. To read a draft, pass its layout as ``entries``.
    """

    def __init__(self, info: CheckpointInfo, entries: Sequence[Json] | None = None) -> None:
        super().__init__(info.path)
        self._info, self._entries = info, entries

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Build torch's metadata from the layout file. Raise CheckpointCorruptError if the file is malformed."""
        try:
            if self._entries is not None:
                return self._build(self._entries)
            return self._build(_read_layout(self._info))
        except CheckpointCorruptError:
            raise
        except (OSError, *MALFORMED) as exc:
            raise corrupt_error(self._info.path, f"{LAYOUT_NAME} cannot be read: {exc}") from exc

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load ``plan``. Raise ValueError if an item would unpack to more bytes than it has on the disk."""
        ranges = {(at.relative_path, at.offset, at.length) for at in map(self._storage_of, plan.items)}
        for name, in_file in itertools.groupby(sorted(ranges), key=operator.itemgetter(0)):
            with open_to_read(Path(self._info.path) / name) as file:
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
        state, storage = build_metadata_tables(entries, all_chunks=self._info.manifest.nodes == 1)
        for name, nbytes in used.items():  # a forged layout may name the same few bytes for many tensors
            if nbytes > self._info.manifest.files[name].nbytes:
                why = f"the entries of {LAYOUT_NAME} need {nbytes:,} bytes in {name}, which has fewer"
                raise corrupt_error(self._info.path, why)
        return Metadata(state, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    def _check_range(self, entry: Json) -> None:
        state_path_of(entry)
        record = self._info.manifest.files.get(entry["file"])
        if record is None:
            why = f"{LAYOUT_NAME} names {entry['file']!r}, which the manifest does not list"
            raise corrupt_error(self._info.path, why)
        if entry["start"] < 0 or entry["nbytes"] < 0 or entry["start"] + entry["nbytes"] > record.nbytes:
            raise corrupt_error(self._info.path, f"the bytes of {entry['name']!r} lie outside {entry['file']}")


@dataclass(frozen=True)
class PlannedLoad:
    """A load into a state that fits the checkpoint. ``unwanted`` has the names that only the checkpoint has."""

    info: CheckpointInfo
    reader: LayoutReader
    planner: SafeLoadPlanner
    plan: LoadPlan
    unwanted: list[str]

    def run(self) -> None:
        """Fill the state in place. If this raises, a part of the state may have been overwritten.

        Raises CheckpointCorruptError if the bytes do not agree with the layout, CheckpointError if the disk cannot be
        read, and torch's OutOfMemoryError if the device has no room.
        """
        try:
            self.reader.read_data(self.plan, self.planner).wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # forged bytes may raise any error
            os_error = _find_os_error(exc)
            if os_error is not None:
                raise _unreadable_error(self.info.path, os_error) from exc
            raise corrupt_error(self.info.path, f"its data cannot be read: {exc}") from exc


def _find_os_error(exc: BaseException) -> OSError | None:
    """Return the error of the operating system behind ``exc``, or None. Python's own OSErrors have no errno."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


def _unreadable_error(path: Path, exc: OSError) -> CheckpointError:
    return CheckpointError(
        f"the data of {path.name} cannot be read",
        why=f"{exc.strerror}: {exc.filename or path}",
        fix="check the disk, and load again; it is not known whether the checkpoint is damaged",
    )


def plan_load(info: CheckpointInfo, reader: LayoutReader, metadata: Metadata, state: dict[str, Any]) -> PlannedLoad:
    """Plan to load the values in ``metadata`` into ``state``. Nothing is loaded yet.

    Raises CheckpointError if the checkpoint lacks a name in ``state`` or has it with another shape or dtype.
    """
    planner = SafeLoadPlanner(info.manifest)
    with duplicate_names_as(CheckpointError):
        planner.set_up_planner(state, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    plan = planner.finish_plan(reader.prepare_local_plan(planner.create_local_plan()))
    unwanted = sorted(metadata.state_dict_metadata.keys() - planner.state_dict.keys())
    return PlannedLoad(info, reader, planner, plan, unwanted)


def require_all_wanted(unwanted: Sequence[tuple[int, list[str]]]) -> None:
    """Raise CheckpointError if a node's checkpoint has a name that no rank of the node has in its state.

    ``unwanted`` has one pair for each rank: the rank's node, and the names that only the checkpoint has. Different
    ranks may have different names in their states.
    """
    for node in {node for node, _ in unwanted}:
        unknown = sorted(set[str].intersection(*(set(names) for other, names in unwanted if other == node)))
        if unknown:
            raise misfit_error(f"the state lacks {len(unknown)} of the checkpoint's names, for example {unknown[0]!r}")


def read_entries(info: CheckpointInfo) -> list[Json]:
    """Return the entries of the layout file. Raise CheckpointCorruptError if they are malformed."""
    LayoutReader(info).read_metadata()
    return [dict(entry) for entry in _read_layout(info)]


def _read_layout(info: CheckpointInfo) -> Any:
    return json.loads(read_file(info.path / LAYOUT_NAME, max_nbytes=MAX_JSON_NBYTES))


def read_tensors(info: CheckpointInfo, *, prefix: str) -> dict[str, torch.Tensor]:
    """Return the tensors whose names begin with ``prefix``, on the host. Shards are put together.

    The names in the result lack the prefix. Hashes are not verified. Raises CheckpointCorruptError if the bytes cannot
    be read.
    """
    saved = SavedTensors(info)
    tensors = saved.read(name for name in saved if name.startswith(prefix))
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


class SavedTensors(Mapping[str, torch.Tensor]):
    """A mapping from flat names, such as ``model.weight``, to the tensors of a checkpoint. Shards are put together.

    A lookup reads one tensor from the files into new host memory; the caller owns it. A caller that takes one tensor
    at a time needs memory for one tensor only. Hashes are not verified.

    A lookup raises KeyError for an unknown name, CheckpointCorruptError if the bytes cannot be read, and
    CheckpointError if some chunks of the tensor are on the disks of other nodes.
    """

    def __init__(self, info: CheckpointInfo, entries: Sequence[Json] | None = None) -> None:
        self.info, self._reader = info, LayoutReader(info, entries)
        self._saved = self._reader.read_metadata()
        described = self._saved.state_dict_metadata.items()
        self._described = {name: value for name, value in described if isinstance(value, TensorStorageMetadata)}

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read several tensors together and return them by name."""
        described = {name: self._described[name] for name in names}
        tensors = {name: torch.empty(value.size, dtype=value.properties.dtype) for name, value in described.items()}
        metadata = Metadata(
            dict(described), storage_data=self._saved.storage_data, storage_meta=self._saved.storage_meta
        )
        plan_load(self.info, self._reader, metadata, dict(tensors)).run()
        return tensors

    def read_plain(self, prefix: str) -> dict[str, Any]:
        """Read the values whose names begin with ``prefix`` and that are no tensors. Return them by last name."""
        saved = self._saved.state_dict_metadata
        found = {name: saved[name] for name in saved if name.startswith(prefix) and name not in self._described}
        state: dict[str, Any] = dict.fromkeys(found)
        metadata = Metadata(found, storage_data=self._saved.storage_data, storage_meta=self._saved.storage_meta)
        plan_load(self.info, self._reader, metadata, state).run()
        return {name.rpartition(".")[2]: value for name, value in state.items()}

    def plan(self, state: dict[str, Any]) -> PlannedLoad:
        """Plan to load everything into ``state``, like :func:`plan_load`."""
        return plan_load(self.info, self._reader, self._saved, state)

    def on_meta(self, name: str) -> torch.Tensor:
        """Return a tensor on the meta device with the shape and dtype of ``name``. No file is read."""
        described = self._described[name]
        return torch.empty(described.size, dtype=described.properties.dtype, device="meta")

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read([name])[name]

    def __contains__(self, name: object) -> bool:
        return name in self._described  # the method of Mapping would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._described)

    def __len__(self) -> int:
        return len(self._described)
