"""torch's checkpoint planners, made safe: they write no unsafe pickle, and execute none."""

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

from hwrl.checkpoint.format.layout import describe_saved
from hwrl.checkpoint.format.manifest import Manifest
from hwrl.checkpoint.format.shards import local_parts
from hwrl.errors import CheckpointError, CheckpointSaveError


@contextlib.contextmanager
def distinct_names(error: type[CheckpointError]) -> Iterator[None]:
    """Raise ``error`` for torch's error about two values of one name. The block flattens a state."""
    try:
        yield
    except ValueError as exc:
        raise error(
            "the state has two values of one name",
            why=str(exc),
            fix='rename one of them: {"a": {"b": …}} and {"a.b": …} are the same in a checkpoint',
        ) from exc


class SafeSavePlanner(DefaultSavePlanner):
    """torch's save planner. Refuses values that only a pickle could hold."""

    def __init__(self) -> None:
        super().__init__(flatten_sharded_tensors=False)  # skips a pass for torch's older ShardedTensors

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """Return a tensor unchanged, any other value as bytes for ``torch.load(weights_only=True)``."""
        if write_item.type is not WriteItemType.BYTE_IO:
            return super().transform_object(write_item, object)
        try:
            data = super().transform_object(write_item, object)
            data.seek(0)
            torch.load(data, map_location="cpu", weights_only=True)
        except Exception as exc:  # a foreign class, or its bytes, may raise any error
            raise _needs_pickle(write_item.index.fqn, object, exc) from exc
        data.seek(0)
        return data


def _needs_pickle(name: str, value: object, exc: Exception) -> CheckpointSaveError:
    inside = re.findall(r"(?:GLOBAL |<class '|<function )([\w.<>]+)", str(exc))[:1]
    return CheckpointSaveError(
        f"state {name!r} cannot be saved",
        why=" of ".join([f"this {type(value).__name__} could be loaded only by executing a pickle", *inside]),
        fix="save tensors, numbers, strings, and dicts, lists and tuples of them",
    )


class SafeLoadPlanner(DefaultLoadPlanner):
    """torch's load planner. Executes no pickle, and refuses a state larger than the checkpoint."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__()
        self._manifest = manifest

    def create_local_plan(self) -> LoadPlan:
        """Return the plan; nothing is loaded yet.

        Raises CheckpointError if names, shapes or dtypes differ, or if a part is on another node's disk.
        """
        assert self.metadata is not None, "set_up_planner comes first"
        _require_same(self.state_dict, self.metadata.state_dict_metadata)
        plan = super().create_local_plan()
        missing = Counter({name: tensor.numel() for (name, _), tensor in local_parts(self.state_dict)})
        for item in plan.items:
            if item.type is LoadItemType.TENSOR:
                missing[item.dest_index.fqn] -= math.prod(item.lengths)
        elsewhere = sorted(name for name, numel in missing.items() if numel > 0)
        if elsewhere:
            raise _on_another_node(self._manifest, elsewhere)
        return plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a value that is no tensor into the state."""
        *parents, last = self.mappings[read_item.dest_index.fqn]
        target: Any = self.original_state_dict
        for key in parents:
            target = target[_original_key(target, key)]
        target[_original_key(target, last)] = torch.load(value, map_location="cpu", weights_only=True)


def _original_key(target: Any, key: str | int) -> Any:
    """Return the key of a dict for torch's string ``key``. List positions stay."""
    return next(own for own in target if str(own) == key) if isinstance(target, dict) else key


def _require_same(state: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    missing = sorted(state.keys() - saved.keys())
    if missing:
        raise misfit_error(f"it lacks {len(missing)} entries, among them {missing[0]!r}")
    for name, value in state.items():
        if (here := _describe(value)) != (there := describe_saved(saved[name])):
            raise misfit_error(f"{name!r} is {there} in the checkpoint and {here} here")


def _describe(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return "no tensor"
    return f"{value.dtype} {list(value.shape)}" + ("" if value.layout is torch.strided else f" {value.layout}")


def misfit_error(why: str) -> CheckpointError:
    """Return the error for a state that differs from the checkpoint."""
    return CheckpointError(
        "the checkpoint does not fit the state that it is to be loaded into",
        why=why,
        fix="build the same model and optimizer as the run that saved it, or start in an empty directory",
    )


def _on_another_node(manifest: Manifest, names: list[str]) -> CheckpointError:
    return CheckpointError(
        f"step {manifest.step} cannot be loaded on {socket.gethostname()}: this disk lacks parts of {names[0]!r}",
        why=f"it has the part that node {manifest.node} of {manifest.nodes} saved, and this rank needs parts of "
        f"{len(names)} tensors that other nodes saved",
        fix="start as many ranks on the same nodes, in the same order; or put the parts of all nodes together with "
        "`hwrl checkpoints join`, and give all ranks the result",
    )
