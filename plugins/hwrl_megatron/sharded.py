"""Checkpoints of any Megatron-core program by hwrl's CheckpointManager: see ``docs/megatron.md``.

It takes the sharded state dicts that Megatron's models and optimizers make. Megatron's own writer, its collectives and
its pickles are not used.
"""

from __future__ import annotations

import io
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
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
)
from megatron.core.dist_checkpointing.utils import (
    extract_nonpersistent,
    extract_sharded_base,
    force_all_tensors_to_non_fp8,
)

from hwrl.checkpoint import CheckpointInfo, DurableFS, Pieces
from hwrl.checkpoint.layout import LayoutReader, write_torch_metadata
from hwrl.checkpoint.manifest import LAYOUT_NAME, in_use, verify_files
from hwrl.errors import CheckpointError, ConfigError

COMMON = "common.pt"
"""The name, in a state and as Megatron's file, of all that is neither a sharded tensor nor a sharded object."""


class ShardedState:
    """A Megatron sharded state dict, in the form that a CheckpointManager saves and fills.

    ``state`` goes to ``save``, and to ``resume`` as the template: under its Megatron key each tensor's rectangles that
    this rank has, which are the caller's memory; each sharded object; and all other values as one. Of what ranks have
    differently the lowest rank's is saved. After a ``resume``, ``loaded`` gives what ``dist_checkpointing.load`` would
    have returned.

    ``sharded`` and what is in it may be used again; no collective is called.
    """

    state: dict[str, Any]

    def __init__(self, sharded: dict[str, Any]) -> None:
        force_all_tensors_to_non_fp8(sharded)  # as Megatron's own load does: it leaves the model's tensors as they are
        built = dict_list_map_outplace(lambda value: value, sharded)
        self._factories, _ = extract_matching_values(
            built, lambda value: isinstance(value, ShardedTensorFactory), return_lists_as_dicts=True
        )
        apply_factories(built)
        self._local, built = extract_nonpersistent(built)
        self._sharded, common = extract_sharded_base(built)
        # A tuple is one value to torch's planner, and to Megatron the list with this rank's objects of that name.
        self._unfilled = (_on_host(common),)
        self.state = {COMMON: self._unfilled}
        for value in nested_values(self._sharded):
            if isinstance(value, ShardedTensor):
                self._add_tensor(value)
            else:
                self._add(value.unique_key, (_on_host(value.data),))

    def _add_tensor(self, tensor: ShardedTensor) -> None:
        if tensor.data is None:
            raise CheckpointError(
                f"{tensor.key!r} has no memory",
                why="the data of its ShardedTensor is None",
                fix="give it a tensor, for example by init_data(device)",
            )
        whole = self._add(tensor.key, Pieces(tensor.global_shape, tensor.dtype, {}))
        if tensor.data.numel():  # where an empty rectangle begins, another may, too
            piece = tensor.data.detach()[(None,) * tensor.prepend_axis_num]
            if whole.pieces.setdefault(tensor.global_offset, piece).shape != piece.shape:
                raise _two_of_one_name(tensor.key)

    def _add(self, name: str, value: Any) -> Any:
        """Return what the state has under ``name``, which is ``value`` if it had nothing."""
        present = self.state.setdefault(name, value)
        if present is not value and _kind(present) != _kind(value):
            raise _two_of_one_name(name)
        return present

    def loaded(self) -> dict[str, Any]:
        """Return what was loaded, nested as it was given, for ``load_state_dict`` of the model and the optimizer.

        Its tensors are the given ones, whose memory was filled, and those that factories make of them. Raises
        CheckpointError if ``state`` itself was not filled.
        """
        common = self.state[COMMON]
        if common is self._unfilled:
            raise CheckpointError(
                "nothing was loaded into this state",
                why="no `resume` was given it, or only a copy of it, or there was no checkpoint",
                fix="give `resume` the attribute `state` itself, and call `loaded` if that returned something",
            )
        filled: dict[str, Any] = dict_list_map_outplace(lambda value: value, common[0])
        merge(filled, dict_list_map_outplace(LocalNonpersistentObject.unwrap, self._local))
        merge(filled, dict_list_map_outplace(self._value_of, self._sharded))
        apply_factory_merges(filled, self._factories)
        return filled

    def _value_of(self, sharded: ShardedTensor | ShardedObject) -> Any:
        if isinstance(sharded, ShardedObject):
            return self.state[sharded.unique_key][0]
        if not sharded.data.numel():
            return sharded.data
        # Not its own data: of several that stand for one rectangle, one was filled.
        return self.state[sharded.key].pieces[sharded.global_offset][(0,) * sharded.prepend_axis_num]


def export(info: CheckpointInfo, directory: Path) -> None:
    """Make ``directory``, which Megatron's ``dist_checkpointing.load`` reads, of a checkpoint of a ShardedState.

    The files are verified, and copied. Raises ConfigError if ``directory`` exists, CheckpointCorruptError if the
    checkpoint is not whole, and CheckpointError if it is a part of one, or of another state.
    """
    if directory.exists():
        raise ConfigError(f"{directory} exists", why="nothing is overwritten", fix="choose another directory")
    if info.manifest.nodes > 1:
        raise CheckpointError(
            f"step {info.step} cannot be exported",
            why=f"{info.path} is the part of node {info.manifest.node} of {info.manifest.nodes}",
            fix="put the parts of all nodes together with `hwrl checkpoints join`, and export the result",
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with in_use(info), tempfile.TemporaryDirectory(dir=directory.parent) as parent:
        draft = Path(parent) / directory.name
        draft.mkdir()
        verify_files(info, info.manifest.files)
        _fill(draft, info)
        draft.rename(directory)


def _fill(draft: Path, info: CheckpointInfo) -> None:
    LayoutReader(info).read_metadata()  # raises if the layout makes no sense
    entries = json.loads((info.path / LAYOUT_NAME).read_bytes())
    common = next((entry for entry in entries if entry["name"] == COMMON), None)
    if common is None:
        raise CheckpointError(
            f"step {info.step} cannot be exported",
            why="what was saved was not the state of a ShardedState alone, under Megatron's names",
            fix="save `ShardedState(...).state`; of a run of `hwrl train`, use `hwrl checkpoints export`",
        )
    others = [entry for entry in entries if entry is not common]
    for name in {entry["file"] for entry in others}:
        shutil.copyfile(info.path / name, draft / name)
    write_torch_metadata(DurableFS(), draft, others)
    torch.save(_read_common(info.path / common["file"], common["start"], common["nbytes"]), draft / COMMON)
    save_config(CheckpointingConfig("torch_dist"), str(draft))


def _read_common(path: Path, start: int, nbytes: int) -> dict[str, Any]:
    with path.open("rb") as file:
        file.seek(start)
        (common,) = torch.load(io.BytesIO(file.read(nbytes)), weights_only=True)
    return dict(common)


def _on_host(value: Any) -> Any:
    """Return a nested value with its tensors on the host: what loads it may have other devices."""
    return dict_list_map_outplace(lambda one: one.detach().cpu() if isinstance(one, torch.Tensor) else one, value)


def _kind(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Pieces) else type(value)


def _two_of_one_name(name: str) -> CheckpointError:
    return CheckpointError(
        f"the state has two values of one name, {name!r}",
        why="they differ in kind, shape or dtype, and a key of Megatron's stands for one tensor or object",
        fix="give one of them another key, for example with Megatron's add_prefix_for_sharding",
    )
