"""Save and load Megatron's sharded state dicts with hwrl's CheckpointManager: see ``docs/megatron.md``.

Works for any Megatron-core program. Megatron's own writer, its collectives and its pickles are not used.
"""

from __future__ import annotations

import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_outplace,
    extract_matching_values,
    merge,
    nested_values,
)
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from megatron.core.dist_checkpointing.utils import (
    extract_nonpersistent,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)
from torch.distributed.tensor import DTensor

from hwrl.checkpoint import CheckpointInfo, DurableFS, LocalShards, copy_for_torch
from hwrl.errors import CheckpointError, ConfigError

COMMON = "common.pt"
"""The name of all values but sharded tensors and objects: a key of the state, and Megatron's file."""


class ShardedState:
    """A Megatron sharded state dict as a state for CheckpointManager.

    Pass the attribute ``state`` to ``save``, and to ``resume`` as the template. It has three kinds of values: this
    rank's rectangles of each tensor, under its Megatron key, in the caller's memory; each sharded object; and all other
    values as one, under COMMON. If a rank has a rectangle or an object several times, the main replica is saved. If
    several ranks have an object or another value, the lowest rank's is saved. After a ``resume``, ``loaded`` returns
    the state as ``dist_checkpointing.load`` would.

    ``sharded`` and its values may be used again. Not collective. Raises CheckpointError for an unsupported
    value, on this rank only: the other ranks wait in ``save`` until the manager's ``timeout_s``.
    """

    state: dict[str, Any]

    def __init__(self, sharded: dict[str, Any]) -> None:
        force_all_tensors_to_non_fp8(sharded)  # as in Megatron's own load; the model's tensors stay
        built = dict_list_map_outplace(lambda value: value, sharded)
        self._factories, _ = extract_matching_values(
            built, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
        )
        apply_factories(built)
        self._local, built = extract_nonpersistent(built)
        self._sharded, common = extract_sharded_base(built)
        # A tuple, because torch's planner takes it as one value. Megatron reads it as the objects of this rank.
        self._unfilled = (_on_host(common),)
        self.state = {COMMON: self._unfilled}
        self._main: dict[Any, Any] = {}
        for value in nested_values(self._sharded):
            if isinstance(value, ShardedTensor):
                self._add_tensor(value)
            else:
                self._add_object(value)
        self._nested(common)  # raise the errors of a load now

    def _add_tensor(self, tensor: ShardedTensor) -> None:
        if tensor.data is None:
            raise CheckpointError(
                f"{tensor.key!r} has no memory",
                why="the data of its ShardedTensor is None",
                fix="give it a tensor, for example by init_data(device)",
            )
        _require_local(tensor.data)
        whole = self._add(tensor.key, LocalShards(tensor.global_shape, tensor.dtype, {}))
        if not tensor.data.numel():  # an empty rectangle may share its offset with another
            return
        piece = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
        place = tensor.key, tensor.global_offset
        if whole.pieces.setdefault(tensor.global_offset, piece).shape != piece.shape:
            raise _two_of_one_name(tensor.key)
        if self._is_first_main(tensor, place, piece.data_ptr()):
            whole.pieces[tensor.global_offset] = piece

    def _add_object(self, given: ShardedObject) -> None:
        value = (_on_host(given.data),)
        self._add(given.unique_key, value)
        if self._is_first_main(given, given.unique_key, id(given.data)):
            self.state[given.unique_key] = value

    def _is_first_main(self, sharded: ShardedTensor | ShardedObject, place: Any, identity: int) -> bool:
        """Return whether ``sharded`` is the first main replica in ``place``. Raises if a second one has other data."""
        if not is_main_replica(sharded.replica_id):
            return False
        known = self._main.setdefault(place, (sharded, identity))
        if known[1] != identity:
            raise _two_of_one_name(sharded.key)
        return known[0] is sharded

    def _add(self, name: str, value: Any) -> Any:
        """Return the state's value under ``name``; a new name gets ``value``."""
        present = self.state.setdefault(name, value)
        if present is not value and _kind(present) != _kind(value):
            raise _two_of_one_name(name)
        return present

    def loaded(self) -> dict[str, Any]:
        """Return the loaded state, nested like the given one, for ``load_state_dict`` of model and optimizer.

        It contains the given tensors, filled, and the results of factories. The main replica takes the place of the
        other replicas of its rectangle. Raises CheckpointError if ``resume`` has not filled ``state``.
        """
        common = self.state[COMMON]
        if common is self._unfilled:
            raise CheckpointError(
                "nothing was loaded into this state",
                why="`resume` did not get it, or got a copy, or found no checkpoint",
                fix="pass the attribute `state` itself to `resume`; call `loaded` only if that returns a checkpoint",
            )
        filled = self._nested(common[0])
        apply_factory_merges(filled, self._factories)
        return filled

    def _nested(self, common: Any) -> dict[str, Any]:
        filled: dict[str, Any] = dict_list_map_outplace(lambda value: value, common)
        try:
            merge(filled, dict_list_map_outplace(LocalNonpersistentObject.unwrap, self._local))
            merge(filled, dict_list_map_outplace(self._value_of, self._sharded))
        except ValueError as exc:
            raise CheckpointError(
                "the state could not be put together again after a load",
                why=f"Megatron cannot merge a list if only some elements are sharded: {exc}",
                fix="use a dict there instead of the list",
            ) from exc
        return filled

    def _value_of(self, sharded: ShardedTensor | ShardedObject) -> Any:
        if isinstance(sharded, ShardedObject):
            return self.state[sharded.unique_key][0]
        if not sharded.data.numel():
            return sharded.data
        # Not ``sharded.data``: if a rectangle has several replicas, only one is filled.
        return self.state[sharded.key].pieces[sharded.global_offset][(0,) * sharded.prepend_axis_num]


def export(info: CheckpointInfo, directory: str | os.PathLike[str]) -> None:
    """Export a checkpoint of a ShardedState to ``directory``, for Megatron's ``dist_checkpointing.load``.

    The files are verified, copied and durable when this returns. A killed export leaves a ``.tmp_…`` directory beside
    ``directory``. Raises ConfigError if ``directory`` exists, CheckpointCorruptError if the checkpoint is damaged, and
    CheckpointError for one node's part, for another kind of state, or if the disk fails.
    """
    directory, fs = Path(directory), DurableFS()
    if os.path.lexists(directory):
        raise ConfigError(f"{directory} exists", why="nothing is overwritten", fix="choose another directory")
    if info.manifest.nodes > 1:
        raise _not_exported(
            info,
            f"{info.path} is the part of node {info.manifest.node} of {info.manifest.nodes}",
            fix="put the parts of all nodes together with `hwrl checkpoints join`, and export the result",
        )
    try:
        fs.mkdir(directory.parent)
        with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".tmp_{directory.name}_") as parent:
            draft = Path(parent) / directory.name
            draft.mkdir()
            _fill(draft, info, fs)
            fs.sync_directory(draft)
            draft.rename(directory)
        fs.sync_directory(directory.parent)
    except OSError as exc:
        raise _not_exported(info, f"{exc.strerror}: {exc.filename}", fix="fix that, or choose another place") from exc


def _fill(draft: Path, info: CheckpointInfo, fs: DurableFS) -> None:
    foreign = _not_exported(
        info,
        "it is not the state of a ShardedState alone, under Megatron's names",
        fix="save `ShardedState(...).state`; of a run of `hwrl train`, use `hwrl checkpoints export`",
    )
    data = copy_for_torch(info, draft, aside=COMMON, fs=fs)
    if data is None:
        raise foreign
    match torch.load(io.BytesIO(data), map_location="cpu", weights_only=True):
        case (dict(common),):
            torch.save(common, draft / COMMON)
        case _:
            raise foreign
    save_config(CheckpointingConfig("torch_dist"), str(draft))
    for name in (COMMON, CONFIG_FNAME):
        fs.adopt_file(draft / name)


def _on_host(value: Any) -> Any:
    """Return a nested value with its tensors on the host. A view is copied, so only its elements are saved."""

    def bring(one: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        _require_local(one)
        one = one.detach().cpu()
        return one if one.untyped_storage().nbytes() == one.nbytes else one.clone()

    return dict_list_map_outplace(bring, value)


def _require_local(tensor: torch.Tensor) -> None:
    if isinstance(tensor, DTensor):
        raise CheckpointError(
            "a sharded state dict of Megatron contains a DTensor",
            why="a ShardedTensor describes its own sharding, and other values are saved by one rank",
            fix="give DTensors to CheckpointManager directly, beside `ShardedState(...).state` or without it",
        )


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, LocalShards) else type(value)


def _two_of_one_name(name: str) -> CheckpointError:
    return CheckpointError(
        f"the state has two values of one name, {name!r}",
        why="a Megatron key is for one tensor or object: one kind, shape and dtype, and one main replica of each part",
        fix="give one of them another key, for example with Megatron's add_prefix_for_sharding, or a replica_id",
    )


def _not_exported(info: CheckpointInfo, why: str, *, fix: str) -> CheckpointError:
    return CheckpointError(f"step {info.step} cannot be exported", why=why, fix=fix)
