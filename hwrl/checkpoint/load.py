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
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from hwrl.checkpoint.layout import Json, build_metadata_tables, describe_saved, require_stored, state_path_of
from hwrl.checkpoint.manifest import (
    LAYOUT_NAME,
    MALFORMED,
    MAX_JSON_NBYTES,
    CheckpointInfo,
    corrupt_error,
)
from hwrl.checkpoint.shards import flatten, is_offloaded, local_tensors, offloaded_error
from hwrl.errors import CheckpointCorruptError, CheckpointError
from hwrl.files import open_to_read, read_file


def read_metadata(info: CheckpointInfo, entries: Sequence[Json] | None = None) -> Metadata:
    """Build torch's metadata from the layout file. torch's own ``.metadata``, a pickle, is never opened.

    A draft has no layout file yet: pass its layout as ``entries``. Raises CheckpointCorruptError if the layout is
    malformed.
    """
    try:
        return _build(info, _read_layout(info) if entries is None else entries)
    except CheckpointCorruptError:
        raise
    except (OSError, *MALFORMED) as exc:
        raise corrupt_error(info.path, f"{LAYOUT_NAME} cannot be read: {exc}") from exc


def _build(info: CheckpointInfo, entries: Sequence[Json]) -> Metadata:
    used: Counter[str] = Counter()
    for entry in entries:
        _check_range(info, entry)
        used[entry["file"]] += entry["nbytes"]
    state, storage = build_metadata_tables(entries, all_chunks=info.manifest.nodes == 1)
    for name, nbytes in used.items():  # a forged layout may name the same few bytes for many tensors
        if nbytes > info.manifest.files[name].nbytes:
            why = f"the entries of {LAYOUT_NAME} need {nbytes:,} bytes in {name}, which has fewer"
            raise corrupt_error(info.path, why)
    return Metadata(state, storage_data=storage)


def _check_range(info: CheckpointInfo, entry: Json) -> None:
    state_path_of(entry)
    record = info.manifest.files.get(entry["file"])
    if record is None:
        raise corrupt_error(info.path, f"{LAYOUT_NAME} names {entry['file']!r}, which the manifest does not list")
    if entry["start"] < 0 or entry["nbytes"] < 0 or entry["start"] + entry["nbytes"] > record.nbytes:
        raise corrupt_error(info.path, f"the bytes of {entry['name']!r} lie outside {entry['file']}")


class PlannedLoad(DefaultLoadPlanner):
    """A load into a state that fits the checkpoint. ``unwanted`` has the names that only the checkpoint has.

    It plans as torch's load planner does, and reads the files itself. It executes no code in a pickle, and the
    checkpoint must fill the state.
    """

    def __init__(self, info: CheckpointInfo, state: dict[str, Any], saved: Metadata) -> None:
        super().__init__()
        self._info = info
        self.set_up_planner(state, saved, is_coordinator=True)
        self._plan = self.create_local_plan()
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
        if lacking := sorted(name for name, numel in unfilled.items() if numel > 0):
            part = self._info.manifest
            raise CheckpointError(
                f"step {part.step} cannot be loaded on {socket.gethostname()}: this disk lacks some of {lacking[0]!r}",
                why=f"the disk has only the part of node {part.node} (of {part.nodes} nodes), and this rank also needs "
                f"bytes of {len(lacking)} tensors from the parts of other nodes",
                fix="start the same number of ranks on the same nodes, in the same order; or join the parts of all "
                "nodes with `hwrl checkpoints join`, and give the result to all ranks",
            )
        return plan

    def run(self) -> None:
        """Fill the state in place. If this raises, a part of the state may have been overwritten.

        Raises CheckpointCorruptError if the bytes do not agree with the layout, CheckpointError if the disk cannot be
        read, and torch's OutOfMemoryError if the device has no room.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        places = self.metadata.storage_data
        items = [(_place(places[item.storage_index]), item) for item in self._plan.items]
        items.sort(key=operator.itemgetter(0))
        try:
            for name, in_file in itertools.groupby(items, key=lambda placed: placed[0][0]):
                with open_to_read(self._info.path / name) as file:
                    for (_, start, nbytes), same in itertools.groupby(in_file, key=operator.itemgetter(0)):
                        file.seek(start)
                        self._load(file.read(nbytes), [item for _, item in same])
        except torch.OutOfMemoryError:
            raise
        except OSError as exc:
            raise CheckpointError(
                f"the data of {self._info.path.name} cannot be read",
                why=f"{exc.strerror}: {exc.filename or self._info.path}",
                fix="check the disk, and load again; it is not known whether the checkpoint is damaged",
            ) from exc
        except Exception as exc:  # forged bytes may raise any error
            raise corrupt_error(self._info.path, f"its data cannot be read: {exc}") from exc

    def _load(self, data: bytes, items: Sequence[ReadItem]) -> None:
        """Put ``data``, one saved item, into each place in the state that needs some of it."""
        require_stored(data)
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        for item in items:
            if item.type is LoadItemType.BYTE_IO:
                *parents, last = self.mappings[item.dest_index.fqn]
                target: Any = self.original_state_dict
                for key in parents:
                    target = target[_original_key(target, key)]
                target[_original_key(target, last)] = value
            else:
                ranges = zip(item.storage_offsets, item.lengths, strict=True)
                part = value[tuple(slice(begin, begin + size) for begin, size in ranges)]
                if part.size() != item.lengths:  # copy_ would repeat its elements
                    raise ValueError(f"{item.storage_index.fqn!r} has the shape {list(value.size())} there")
                self.resolve_tensor(item).detach().copy_(part)


def _place(info: Any) -> tuple[str, int, int]:
    return info.relative_path, info.offset, info.length


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
    read_metadata(info)
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
        self.info, self._saved = info, read_metadata(info, entries)
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
        for (name, _), tensor in local_tensors(flatten(state, CheckpointError)[0]):
            if is_offloaded(tensor):
                raise offloaded_error(name)
        return self._plan(state, self._saved.state_dict_metadata)

    def _plan(self, state: dict[str, Any], described: Mapping[str, Any]) -> PlannedLoad:
        return PlannedLoad(self.info, state, replace(self._saved, state_dict_metadata=dict(described)))

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
