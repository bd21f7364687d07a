"""The state of modules, optimizers and other objects: :func:`take_state`, :func:`make_template`, :func:`restore`.

torch's ``get_state_dict`` takes an optimizer step if the optimizer has no state yet, to learn the state's tensors. A
step changes the program: its counters, gradients and hooks. Here no step is ever taken. A save takes the state that
there is, and stores its structure beside the tensors. A load makes the tensors after this structure.

An optimizer's state is saved under the names of its parameters in the modules beside it, so it fits any sharding. A
parameter that is in none of them is named by its number in the optimizer.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
import random
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import _get_fqns, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import empty as empty_dtensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwrl.checkpoint.load import SavedTensors, misfit_error
from hwrl.discovery import backend_or_default
from hwrl.errors import CheckpointSaveError, ConfigError
from hwrl.interfaces import Backend

_log = logging.getLogger(__name__)

_STRUCTURE = "structure-"  # in names: the value is a structure
_EXTRA_STATE = "_extra_state"  # ends the names that torch gives to the extra states of modules
_TENSOR = "hwrl.tensor"  # a dict with this key stands for a tensor in a structure, and has its name


def require_parts(parts: Mapping[str, Any]) -> None:
    """Raise ConfigError if one of ``parts`` has no state to take."""
    for name, part in parts.items():
        if not _is_part(part):
            raise ConfigError(
                f"{name}={part!r} is not allowed",
                why="CheckpointManager has no such option, and this object has no state_dict and load_state_dict",
                fix="correct the name of the option, or give each object of the state a keyword of its own: "
                "model=, optimizer=, scheduler= and so on",
            )
        if isinstance(part, nn.Module) and any(isinstance(one, FullyShardedDataParallel) for one in part.modules()):
            raise ConfigError(
                f"{name}= cannot be saved",
                why="it is wrapped by FullyShardedDataParallel, whose parameters have no names of their own",
                fix="shard it by torch's fully_shard; or give `save` and `resume` a state of your own",
            )


def take_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the state of each object in its place. It shares the objects' tensors."""
    taken: dict[str, Any] = {}
    for name, part in state.items():
        if not _is_part(part):
            taken[name] = part
            continue
        packer = _Packer()
        structures = {path: packer.pack(path, value) for path, value in _pieces(part, state).items()}
        taken[name] = {**_own_tensors(part), **packer.tensors}
        if structures:
            # Stages of a pipeline have other pieces each, so their structures get other names.
            digest = hashlib.sha256("\n".join(structures).encode()).hexdigest()[:16]
            taken[name][f"{_STRUCTURE}{digest}"] = (structures,)  # a dict would be many values
    return taken


def make_template(state: Mapping[str, Any], saved: SavedTensors) -> dict[str, Any]:
    """Return what a load of ``saved`` must fill. The tensors of modules and optimizers are filled in place.

    Raises CheckpointError if an object is not in the checkpoint, or has another number of parameter groups there.
    """
    template: dict[str, Any] = {}
    for name, part in state.items():
        template[name] = _template_of(name, part, state, saved) if _is_part(part) else part
    return template


def _template_of(name: str, part: Any, state: Mapping[str, Any], saved: SavedTensors) -> dict[str, Any]:
    template = saved.read_plain(f"{name}.{_STRUCTURE}")
    live: dict[str, Any] = {"": None}
    likes: dict[str, torch.Tensor] = {}
    if isinstance(part, nn.Module):
        live = _pieces(part, state)
    elif isinstance(part, torch.optim.Optimizer) and "" not in (pieces := _pieces(part, state)):
        live, names = pieces, _numbered_names(part, state)
        likes = {f"state.{names[number]}": one for number, one in enumerate(_parameters(part))}
    structures = _merged(template)
    if not template and not isinstance(part, nn.Module) and any(one.startswith(f"{name}.") for one in saved):
        raise misfit_error(f"{name!r} is there in another form, of an earlier version of hwrl or a dict of tensors")
    template |= _own_tensors(part)
    lacking = {path for path in live if path not in structures and path not in likes}
    whole = "" if isinstance(part, nn.Module) else "param_groups."  # the rest may be missing on a rank
    surplus = {path for path in structures if path.startswith(whole) and path not in live}
    for path in sorted(lacking | surplus):
        where = "checkpoint" if path in lacking else "state"
        raise misfit_error(f"the {where} has no {f'{name}.{path}'.rstrip('.')!r}")
    for path in structures.keys() & (live.keys() | likes.keys()):  # a parameter without a gradient has no state
        for tensor_name, leaf, is_sharded in _leaves(structures[path], live.get(path)):
            if tensor_name not in template:
                described = saved.on_meta(f"{name}.{tensor_name}")
                template[tensor_name] = _blank(described, leaf, likes.get(path), is_sharded=is_sharded)
    return template


def restore(state: MutableMapping[str, Any], template: Mapping[str, Any]) -> None:
    """Give the filled ``template`` to the objects in ``state``, and put the other values into it."""
    for name, part in state.items():
        filled = template[name]
        if not _is_part(part):
            state[name] = filled
        elif isinstance(part, nn.Module):
            extra = {key: _with_tensors(one, filled) for key, one in _merged(filled).items()}
            set_model_state_dict(part, {**{key: filled[key] for key in _own_tensors(part)}, **extra})
        elif "" not in (structures := _merged(filled)):
            _restore_optimizer(part, _numbered_names(part, state), filled)
        else:
            part.load_state_dict(_with_tensors(structures[""], filled))


def _restore_optimizer(optimizer: torch.optim.Optimizer, names: Mapping[int, str], filled: Mapping[str, Any]) -> None:
    structures = _merged(filled)
    by_number = {
        number: _with_tensors(structures[f"state.{name}"], filled)
        for number, name in names.items()
        if f"state.{name}" in structures
    }
    numbers = iter(names)
    groups = [
        {
            **_with_tensors(structures[f"param_groups.{index}"], filled),
            "params": list(itertools.islice(numbers, len(group["params"]))),
        }
        for index, group in enumerate(optimizer.param_groups)
    ]
    rest = _with_tensors(structures["rest"], filled)
    optimizer.load_state_dict({**rest, "state": {**rest["state"], **by_number}, "param_groups": groups})
    for number, one in enumerate(_parameters(optimizer)):
        for key in optimizer.state.get(one, {}).keys() & by_number.get(number, {}).keys():
            optimizer.state[one][key] = _uncast(optimizer.state[one][key], by_number[number][key])


def _uncast(own: Any, value: Any) -> Any:
    """Return ``own``, which torch has cast to the dtype of a parameter, with the dtypes and strings of ``value``."""
    if isinstance(own, torch.Tensor) and isinstance(value, torch.Tensor):
        return own if own.dtype == value.dtype else value.to(own.device)
    if isinstance(own, dict) and isinstance(value, dict) and own.keys() == value.keys():
        return {key: _uncast(own[key], one) for key, one in value.items()}
    if isinstance(own, list | tuple) and isinstance(value, list | tuple) and len(own) == len(value):
        return type(value)(_uncast(*both) for both in zip(own, value, strict=True))
    return value if isinstance(value, str) else own


def _is_part(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def _pieces(part: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pieces of an object's state that ranks have or lack: of an optimizer, each parameter's and group's.

    A module's pieces are its extra states: they may have another structure in each step.
    """
    if isinstance(part, nn.Module):
        return {key: value for key, value in get_model_state_dict(part).items() if key.endswith(_EXTRA_STATE)}
    own = part.state_dict()
    if not (isinstance(part, torch.optim.Optimizer) and own.keys() >= {"state", "param_groups"}):
        return {"": own}  # a container of optimizers may have a form of its own
    names = _numbered_names(part, state)
    pieces = {f"state.{names[number]}": one for number, one in own["state"].items() if number in names}
    for number, group in enumerate(own["param_groups"]):  # which parameters are in it is this program's matter
        pieces[f"param_groups.{number}"] = {key: group[key] for key in group if key not in ("params", "param_names")}
    rest = {key: value for key, value in own.items() if key != "param_groups"}
    rest["state"] = {key: value for key, value in own["state"].items() if key not in names}
    return {**pieces, "rest": rest}


def _own_tensors(part: Any) -> dict[str, Any]:
    """Return the parameters and buffers of a module, and nothing for another object."""
    own = get_model_state_dict(part) if isinstance(part, nn.Module) else {}
    return {key: value for key, value in own.items() if not key.endswith(_EXTRA_STATE)}


def _numbered_names(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> dict[int, str]:
    """Return the name of each parameter, by its number in ``optimizer.state_dict()``.

    If several of the optimizer's parameters have the same name in their modules, those of the modules come first.
    """
    found: dict[torch.Tensor, tuple[str, str]] = {}
    for part_name, part in state.items():
        names: Mapping[Any, str] = {}
        if isinstance(part, nn.Module):
            names = parameter_names(part)
        elif isinstance(part, dict):
            names = {one: name for name, one in part.items() if isinstance(one, nn.Parameter)}
        for one, name in names.items():  # the order of the state does not matter
            found[one] = min(found.get(one, (part_name, name)), (part_name, name))
    held = [found.get(one, ("", str(number))) for number, one in enumerate(_parameters(optimizer))]
    uses = Counter(name for _, name in held)
    return {number: name if uses[name] == 1 else f"{part}.{name}" for number, (part, name) in enumerate(held)}


def parameter_names(module: nn.Module) -> dict[torch.Tensor, str]:
    """Return the name of each parameter, as torch's ``get_model_state_dict`` has it. Tied parameters have one."""
    return {one: min(_get_fqns(module, name)) for name, one in module.named_parameters()}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)


# -- structures -----------------------------------------------------------------------------------------------------


class _Packer:
    """Moves the tensors of a state into ``tensors``, by name, and leaves marks in their places."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}

    def pack(self, path: str, value: Any) -> Any:
        """Return a copy of ``value`` with marks in place of the tensors."""
        if isinstance(value, torch.Tensor):
            return self._pack_tensor(path, value)
        if isinstance(value, dict):
            packed = copy.copy(value)
            packed.update({key: self.pack(f"{path}.{key}".lstrip("."), one) for key, one in value.items()})
            return packed
        if type(value) in (list, tuple):
            return type(value)(self.pack(f"{path}.{index}".lstrip("."), one) for index, one in enumerate(value))
        return value

    def _pack_tensor(self, path: str, value: torch.Tensor) -> dict[str, Any]:
        if is_traceable_wrapper_subclass(value) and not isinstance(value, DTensor):
            attributes, context = value.__tensor_flatten__()
            return {
                _TENSOR: path,
                "class": _class_name(type(value)),
                "inner": {name: self._pack_tensor(f"{path}.{name}", getattr(value, name)) for name in attributes},
                "context": (context, tuple(value.shape), value.stride()),
            }
        name = self._names.setdefault(id(value), path)  # the same tensor twice stays one
        if self.tensors.setdefault(name, value) is not value:
            raise CheckpointSaveError(
                "the state has two values with the same name", why=f"both are {path!r}", fix="rename one of them"
            )
        return {_TENSOR: name, "sharded": isinstance(value, DTensor)}


def _leaves(structure: Any, live: Any) -> Iterator[tuple[str, Any, bool]]:
    """Yield the name of each tensor in a structure, the value at its place in ``live``, and whether it is sharded."""
    if isinstance(structure, dict) and _TENSOR in structure:
        if "class" in structure:
            for mark in structure["inner"].values():
                yield from _leaves(mark, None)
        else:
            yield structure[_TENSOR], live, structure["sharded"]
    elif isinstance(structure, dict):
        for key, one in structure.items():
            yield from _leaves(one, live.get(key) if isinstance(live, dict) else None)
    elif isinstance(structure, list | tuple):
        for index, one in enumerate(structure):
            is_there = isinstance(live, list | tuple) and index < len(live)
            yield from _leaves(one, live[index] if is_there else None)


def _merged(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the structures in the state of a part, by their paths."""
    merged: dict[str, Any] = {}
    for key in sorted(key for key in state if key.startswith(_STRUCTURE)):
        merged |= state[key][0]
    return merged


def _with_tensors(structure: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(structure, dict) and _TENSOR in structure:
        if "class" not in structure:
            return tensors[structure[_TENSOR]]
        inner = {name: _with_tensors(mark, tensors) for name, mark in structure["inner"].items()}
        return _known_class(structure["class"]).__tensor_unflatten__(inner, *structure["context"])
    if isinstance(structure, dict):
        filled = copy.copy(structure)
        filled.update({key: _with_tensors(one, tensors) for key, one in structure.items()})
        return filled
    if isinstance(structure, list | tuple):
        return type(structure)(_with_tensors(one, tensors) for one in structure)
    return structure


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _known_class(name: str) -> Any:
    """Return a tensor class that its library has declared safe to load. A checkpoint must not name any other."""
    for kind in torch.serialization.get_safe_globals():
        if isinstance(kind, type) and issubclass(kind, torch.Tensor) and _class_name(kind) == name:
            return kind
    raise misfit_error(f"the checkpoint has tensors of the class {name}, which torch.serialization does not know here")


def _blank(described: torch.Tensor, live: Any, parameter: torch.Tensor | None, *, is_sharded: bool) -> torch.Tensor:
    """Return the tensor to fill: ``live`` if it fits, else a new one, sharded and placed like ``parameter``."""
    if type(live) in (torch.Tensor, DTensor) and (live.shape, live.dtype) == (described.shape, described.dtype):
        filled_in_place: torch.Tensor = live.detach()
        return filled_in_place
    if parameter is not None and described.ndim and parameter.shape == described.shape:
        return torch.empty_like(parameter.detach(), dtype=described.dtype)
    if is_sharded and isinstance(parameter, DTensor):
        mesh = parameter.device_mesh
        whole = [Replicate()] * mesh.ndim
        return empty_dtensor(*described.shape, dtype=described.dtype, device_mesh=mesh, placements=whole)
    return torch.empty(described.shape, dtype=described.dtype, device="cpu")


# -- random numbers -------------------------------------------------------------------------------------------------


def rng_state(backend: Backend | None = None) -> dict[str, Any]:
    """Return the states of four generators: the device's, torch's on the host, numpy's global one, and Python's.

    Without ``backend``, the chosen backend's device is used. The result is about 50 kB of JSON.
    """
    backend = backend_or_default(backend)
    version, words, gauss = random.getstate()
    numpy: Any = np.random.get_state(legacy=False)
    return {
        "device": backend.rng_state().tolist(),
        "device_type": backend.info.device_type,
        "host": torch.get_rng_state().tolist(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
        "python": [version, list(words), gauss],
    }


def set_rng_state(state: dict[str, Any], backend: Backend | None = None) -> None:
    """Restore the generators from the result of :func:`rng_state`.

    The device's generator is restored only on the type of device that saved it. On another type it is not changed, and
    a warning is logged.
    """
    backend = backend_or_default(backend)
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(torch.tensor(state["host"], dtype=torch.uint8))
    saved_on, device_type = state["device_type"], backend.info.device_type
    if saved_on == device_type:
        backend.set_rng_state(torch.tensor(state["device"], dtype=torch.uint8))
    else:
        _log.warning("the device's generator is not restored: it was saved on %r and this is %r", saved_on, device_type)
