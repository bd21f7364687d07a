"""Load a checkpoint with the help of its layout: :class:`SavedTensors`, :class:`PlannedLoad`."""

from __future__ import annotations

import io
import itertools
import json
import math
import operator
import socket
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from hwrl.checkpoint.layout import Json, build_metadata_tables, describe_saved, require_stored, state_path_of
from hwrl.checkpoint.manifest import (
    LAYOUT_NAME,
    MALFORMED,
    MAX_JSON_NBYTES,
    CheckpointInfo,
    Manifest,
    corrupt_error,
)
from hwrl.checkpoint.shards import flatten, local_tensors, require_storage
from hwrl.errors import CheckpointCorruptError, CheckpointError
from hwrl.files import open_to_read, read_file


class LayoutReader(FileSystemReader):
    """torch's storage reader, but it reads the layout file. It never opens torch's own ``.metadata``, a pickle.

    A draft has no layout file yet. To read a draft, pass its layout as ``entries``.
    """

    def __init__(self, info: CheckpointInfo, entries: Sequence[Json] | None = None) -> None:
        super().__init__(info.path)
        self.info, self._entries = info, entries

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Build torch's metadata from the layout file. Raise CheckpointCorruptError if the file is malformed."""
        try:
            return self._build(_read_layout(self.info) if self._entries is None else self._entries)
        except CheckpointCorruptError:
            raise
        except (OSError, *MALFORMED) as exc:
            raise corrupt_error(self.info.path, f"{LAYOUT_NAME} cannot be read: {exc}") from exc

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Load ``plan``. Raise ValueError if an item would unpack to more bytes than it has on the disk."""
        places = (self.storage_data[item.storage_index] for item in plan.items)
        ranges = {(at.relative_path, at.offset, at.length) for at in places}
        for name, in_file in itertools.groupby(sorted(ranges), key=operator.itemgetter(0)):
            with open_to_read(Path(self.info.path) / name) as file:
                for _, start, nbytes in in_file:
                    require_stored(file, start=start, nbytes=nbytes)
        return super().read_data(plan, planner)

    def _build(self, entries: Sequence[Json]) -> Metadata:
        used: Counter[str] = Counter()
        for entry in entries:
            self._check_range(entry)
            used[entry["file"]] += entry["nbytes"]
        state, storage = build_metadata_tables(entries, all_chunks=self.info.manifest.nodes == 1)
        for name, nbytes in used.items():  # a forged layout may name the same few bytes for many tensors
            if nbytes > self.info.manifest.files[name].nbytes:
                why = f"the entries of {LAYOUT_NAME} need {nbytes:,} bytes in {name}, which has fewer"
                raise corrupt_error(self.info.path, why)
        return Metadata(state, storage_data=storage, storage_meta=StorageMeta(load_id=self.load_id))

    def _check_range(self, entry: Json) -> None:
        state_path_of(entry)
        record = self.info.manifest.files.get(entry["file"])
        if record is None:
            why = f"{LAYOUT_NAME} names {entry['file']!r}, which the manifest does not list"
            raise corrupt_error(self.info.path, why)
        if entry["start"] < 0 or entry["nbytes"] < 0 or entry["start"] + entry["nbytes"] > record.nbytes:
            raise corrupt_error(self.info.path, f"the bytes of {entry['name']!r} lie outside {entry['file']}")


class PlannedLoad(DefaultLoadPlanner):
    """A load into a state that fits the checkpoint. ``unwanted`` has the names that only the checkpoint has.

    It is torch's load planner, but it executes no code in a pickle, and the checkpoint must fill the state.
    """

    def __init__(self, reader: LayoutReader, state: dict[str, Any], saved: Metadata) -> None:
        super().__init__()
        self._reader = reader
        self.set_up_planner(state, saved, is_coordinator=True)
        reader.set_up_storage_reader(saved, is_coordinator=True)
        self._plan = self.finish_plan(reader.prepare_local_plan(self.create_local_plan()))
        self.unwanted = sorted(saved.state_dict_metadata.keys() - self.state_dict.keys())

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. Nothing is loaded yet.

        Raises CheckpointError if the checkpoint lacks a name of the state, if shapes or dtypes differ, or if this rank
        needs bytes on another node's disk.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        saved = self.metadata.state_dict_metadata
        if missing := sorted(self.state_dict.keys() - saved.keys()):
            raise misfit_error(f"the checkpoint lacks {len(missing)} of the state's names, for example {missing[0]!r}")
        for name, value in self.state_dict.items():
            if (here := _describe(value)) != (there := describe_saved(saved[name])):
                raise misfit_error(f"{name!r} is {there} in the checkpoint and {here} in the state")
        plan = super().create_local_plan()
        unfilled: Counter[str] = Counter()  # elements
        for (name, _), tensor in local_tensors(self.state_dict):
            unfilled[name] += tensor.numel()
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                unfilled[item.dest_index.fqn] -= math.prod(item.lengths)
        on_other_nodes = sorted(name for name, numel in unfilled.items() if numel > 0)
        if on_other_nodes:
            raise _on_another_node(self._reader.info.manifest, on_other_nodes)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a non-tensor value into the state."""
        *parents, last = self.mappings[read_item.dest_index.fqn]
        target: Any = self.original_state_dict
        for key in parents:
            target = target[_original_key(target, key)]
        target[_original_key(target, last)] = torch.load(value, map_location="cpu", weights_only=True)

    def run(self) -> None:
        """Fill the state in place. If this raises, a part of the state may have been overwritten.

        Raises CheckpointCorruptError if the bytes do not agree with the layout, CheckpointError if the disk cannot be
        read, and torch's OutOfMemoryError if the device has no room.
        """
        try:
            self._reader.read_data(self._plan, self).wait()
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # forged bytes may raise any error
            if (broken := _find_os_error(exc)) is not None:
                raise CheckpointError(
                    f"the data of {self._reader.info.path.name} cannot be read",
                    why=f"{broken.strerror}: {broken.filename or self._reader.info.path}",
                    fix="check the disk, and load again; it is not known whether the checkpoint is damaged",
                ) from exc
            raise corrupt_error(self._reader.info.path, f"its data cannot be read: {exc}") from exc


def _original_key(target: Any, key: str | int) -> Any:
    """Return the key of ``target`` that torch turned into the string ``key``. Return a list position unchanged."""
    return next(own for own in target if str(own) == key) if isinstance(target, dict) else key


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "not a tensor"
    return f"{value.dtype} {list(value.shape)}" + ("" if value.layout is torch.strided else f" {value.layout}")


def misfit_error(why: str) -> CheckpointError:
    """Return the error for a state with other names, shapes or dtypes than the checkpoint."""
    return CheckpointError(
        "the checkpoint does not fit the state",
        why=why,
        fix="build the same model and optimizer as the run that saved it, or start in an empty directory",
    )


def _on_another_node(manifest: Manifest, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"step {manifest.step} cannot be loaded on {socket.gethostname()}: this disk lacks some of {names[0]!r}",
        why=f"the disk has only the part of node {manifest.node} (of {manifest.nodes} nodes), and this rank also needs "
        f"bytes of {len(names)} tensors from the parts of other nodes",
        fix="start the same number of ranks on the same nodes, in the same order; or join the parts of all nodes with "
        "`hwrl checkpoints join`, and give the result to all ranks",
    )


def _find_os_error(exc: BaseException) -> OSError | None:
    """Return the error of the operating system behind ``exc``, or None. Python's own OSErrors have no errno."""
    cause: BaseException | None = exc
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause
        cause = cause.__cause__ or cause.__context__
    return None


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
        self._plan(dict(tensors), described).run()
        return tensors

    def read_plain(self, prefix: str) -> dict[str, Any]:
        """Read the values whose names begin with ``prefix`` and that are no tensors. Return them by last name."""
        saved = self._saved.state_dict_metadata
        found = {name: saved[name] for name in saved if name.startswith(prefix) and name not in self._described}
        state: dict[str, Any] = dict.fromkeys(found)
        self._plan(state, found).run()
        return {name.rpartition(".")[2]: value for name, value in state.items()}

    def plan(self, state: dict[str, Any]) -> PlannedLoad:
        """Plan to load everything into ``state``. Nothing is loaded yet.

        Raises CheckpointError if the checkpoint lacks a name in ``state`` or has it with another shape or dtype, and
        MemoryStateError for an offloaded tensor.
        """
        require_storage(flatten(state, CheckpointError)[0])
        return self._plan(state, self._saved.state_dict_metadata)

    def _plan(self, state: dict[str, Any], described: Mapping[str, Any]) -> PlannedLoad:
        return PlannedLoad(self._reader, state, replace(self._saved, state_dict_metadata=dict(described)))

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
