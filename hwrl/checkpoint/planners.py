"""torch's checkpoint planners, made safe: they handle only values that ``torch.load(weights_only=True)`` can read."""

from __future__ import annotations

import contextlib
import io
import math
import re
import socket
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem, WriteItem, WriteItemType

from hwrl.checkpoint.layout import describe_saved
from hwrl.checkpoint.manifest import Manifest
from hwrl.checkpoint.shards import local_tensors
from hwrl.errors import CheckpointError, CheckpointSaveError


@contextlib.contextmanager
def duplicate_names_as(error: type[CheckpointError]) -> Iterator[None]:
    """Raise ``error`` if a state has two values with the same flat name. The block must flatten the state.

    torch raises a ValueError then. Every ValueError in the block is taken for this one.
    """
    try:
        yield
    except ValueError as exc:
        raise error(
            "the state has two values with the same name",
            why=str(exc),
            fix='rename one of them: {"a": {"b": …}} and {"a.b": …} have the same name in a checkpoint',
        ) from exc


class SafeSavePlanner(DefaultSavePlanner):
    """torch's save planner, but it refuses a value that ``torch.load(weights_only=True)`` could not load."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)  # skip the pass for torch's deprecated ShardedTensor

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor unchanged. Return any other value as bytes for ``torch.load(weights_only=True)``."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        try:
            data = super().transform_object(write_item, object)
            data.seek(0)
            torch.load(data, map_location="cpu", weights_only=True)
        except Exception as exc:  # a user's class may raise any error
            raise _needs_pickle(write_item.index.fqn, object, exc) from exc
        data.seek(0)
        return data


def _needs_pickle(name: str, value: object, exc: Exception) -> CheckpointSaveError:
    kind, inside = type(value).__name__, re.search(r"(?:GLOBAL |<class '|<function )([\w.<>]+)", str(exc))
    if inside is not None:
        why = f"loading this {kind} would execute a pickle that uses {inside[1]}"
    else:
        why = f"this {kind} cannot be saved and read back: {type(exc).__name__}: {exc}"
    return CheckpointSaveError(
        f"state {name!r} cannot be saved",
        why=why,
        fix="save only tensors, numbers, strings, and dicts, lists and tuples of these",
    )


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's load planner, but it executes no code in a pickle, and the checkpoint must fill the state."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def create_local_plan(self) -> LoadPlan:
        """Return the plan. Nothing is loaded yet.

        Raises CheckpointError if the checkpoint lacks a name of the state, if shapes or dtypes differ, or if this rank
        needs bytes on another node's disk.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        _require_same(self.state_dict, self.metadata.state_dict_metadata)
        plan = super().create_local_plan()
        unfilled: Counter[str] = Counter()  # elements
        for (name, _), tensor in local_tensors(self.state_dict):
            unfilled[name] += tensor.numel()
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                unfilled[item.dest_index.fqn] -= math.prod(item.lengths)
        on_other_nodes = sorted(name for name, numel in unfilled.items() if numel > 0)
        if on_other_nodes:
            raise _on_another_node(self._manifest, on_other_nodes)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a non-tensor value into the state."""
        *parents, last = self.mappings[read_item.dest_index.fqn]
        target: Any = self.original_state_dict
        for key in parents:
            target = target[_original_key(target, key)]
        target[_original_key(target, last)] = torch.load(value, map_location="cpu", weights_only=True)


def _original_key(target: Any, key: str | int) -> Any:
    """Return the key of ``target`` that torch turned into the string ``key``. Return a list position unchanged."""
    return next(own for own in target if str(own) == key) if isinstance(target, dict) else key


def _require_same(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = sorted(state.keys() - saved.keys())
    if missing:
        raise misfit_error(f"the checkpoint lacks {len(missing)} of the state's names, for example {missing[0]!r}")
    for name, value in state.items():
        if (here := _describe(value)) != (there := describe_saved(saved[name])):
            raise misfit_error(f"{name!r} is {there} in the checkpoint and {here} in the state")


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
