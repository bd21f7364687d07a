"""Find the memory of a model and of an optimizer: :func:`stored_tensors`, :func:`device_storages`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parameter import Buffer, is_lazy
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwrl.errors import MemoryStateError
from hwrl.memory.guards import Offloaded, OffloadedTensor, optimizers_in

_PLAIN = (torch.Tensor, nn.Parameter, Buffer, Offloaded, OffloadedTensor)
_NO_STATE = (type, FunctionType, ModuleType, nn.Module, Optimizer)

NamedTensors = Iterable[tuple[str, torch.Tensor]]
"""Tensors, and their names for messages."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor with a storage. ``versions`` has its version counter, after those of the tensors that wrap it.

    ``wrapper_class`` is the class of a surrounding tensor of a type unknown to hwrl, or None. Only that class can
    rebuild the surrounding tensor from its parts.
    """

    name: str
    tensor: torch.Tensor
    versions: tuple[int, ...]
    wrapper_class: str | None

    @property
    def storage_key(self) -> int:
        """A key; tensors with shared memory have the same key."""
        return self.tensor.untyped_storage()._cdata if self.tensor.layout is torch.strided else id(self.tensor)


@dataclass(frozen=True)
class SharedStorage:
    """A storage, and all tensors on it."""

    storage: torch.UntypedStorage
    tensors: tuple[StoredTensor, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version counters of all tensors on the storage."""
        return tuple(version for stored in self.tensors for version in stored.versions)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of ``model``; FSDP2 modules are resharded first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass alone, the root still holds unsharded parameters
    yield from model.named_parameters()
    yield from model.named_buffers()


def optimizer_tensors(optimizer: object) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the states of ``optimizer``, one of torch or a wrapper around some, and their parameters."""
    for one in optimizers_in(optimizer):
        kind = type(one).__name__
        for state in list(one.state.values()):
            yield from _tensors_in(state, f"{kind}.state", set())
        # Some may be the optimizer's own float32 copies. Callers exclude the model's parameters.
        for group in one.param_groups:
            yield from ((f"{kind}.param_groups", parameter) for parameter in group["params"])


def stored_tensors(named: NamedTensors) -> Iterator[StoredTensor]:
    """Yield the tensors with storages behind ``named``: for a wrapper subclass, the tensors inside it.

    Other subclasses may keep tensors in attributes, such as scales of quantized weights; yield these, too.
    """
    for name, tensor in named:
        yield from _stored_tensors(name, tensor, (), None)


def _stored_tensors(
    name: str, tensor: torch.Tensor, versions: tuple[int, ...], wrapper_class: str | None
) -> Iterator[StoredTensor]:
    if is_lazy(tensor):
        return  # no memory yet
    versions = (*versions, -1 if tensor.is_inference() else tensor._version)
    if is_traceable_wrapper_subclass(tensor):
        wrapper_class = wrapper_class if isinstance(tensor, DTensor) else type(tensor).__name__
        for attribute in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from _stored_tensors(f"{name}.{attribute}", inner, versions, wrapper_class)
        return
    hidden = list(_hidden_in(tensor, name))
    wrapper_class = type(tensor).__name__ if hidden else wrapper_class
    yield StoredTensor(name, tensor, versions, wrapper_class)
    for path, one in hidden:
        yield from _stored_tensors(path, one, versions, wrapper_class)


def _hidden_in(tensor: torch.Tensor, name: str) -> NamedTensors:
    """Return the tensors in the attributes of a tensor subclass, but not gradients: they never move."""
    if type(tensor) in _PLAIN:
        return ()
    attributes = {key: value for key, value in vars(tensor).items() if "grad" not in key}
    return _tensors_in(attributes, name, {id(tensor)})


def _tensors_in(value: object, name: str, seen: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in list(value.items()):
            yield from _tensors_in(one, f"{name}[{key!r}]" if isinstance(key, (str, int)) else name, seen)
    elif isinstance(value, (list, tuple, Set)):
        for number, one in enumerate(value):
            yield from _tensors_in(one, f"{name}[{number}]", seen)
    elif _may_hold_state(value):
        yield from _tensors_in(vars(value), name, seen)


def _may_hold_state(value: object) -> bool:
    """Return whether ``value`` is an object outside torch: torch's own objects, such as meshes, keep their tensors."""
    from_torch = type(value).__module__.partition(".")[0] == "torch"
    return hasattr(value, "__dict__") and not from_torch and not isinstance(value, _NO_STATE)


def device_storages(tensors: Iterable[StoredTensor], part: str, *, device_type: str) -> list[SharedStorage]:
    """Return each storage of ``tensors`` on the device, once.

    Raises :class:`~hwrl.errors.MemoryStateError`, with the tensor's name, if its memory cannot be moved.
    """
    found: dict[int, list[StoredTensor]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for stored in tensors:
        if stored.tensor.device.type != device_type:
            continue
        storage = _movable_storage(stored, part)
        if storage.nbytes():
            storages[stored.storage_key] = storage
            found.setdefault(stored.storage_key, []).append(stored)
    return [SharedStorage(storage, tuple(found[key])) for key, storage in storages.items()]


def _movable_storage(stored: StoredTensor, part: str) -> torch.UntypedStorage:
    tensor = stored.tensor
    if tensor.layout is not torch.strided:
        _refuse(part, stored, why=f"is a {tensor.layout} tensor", fix="replace it by its to_dense()")
    storage = tensor.untyped_storage()
    if not _has_address(storage):
        kind = type(tensor).__qualname__
        why = f"is a {kind}, and its memory cannot be found"
        _refuse(part, stored, why=why, fix=f"give {kind} __tensor_flatten__ and __tensor_unflatten__, or don't offload")
    if not storage.resizable():
        why = f"has {storage.nbytes():,} bytes that belong to a file, an array or another process"
        fix = "give the model memory of its own: hwrl.memory.own_memory(model)"
        _refuse(part, stored, why=why, fix=fix)
    return storage


def _refuse(part: str, stored: StoredTensor, *, why: str, fix: str) -> NoReturn:
    raise MemoryStateError(f"the {part} cannot be offloaded", why=f"{stored.name} {why}", fix=fix)


def _has_address(storage: torch.UntypedStorage) -> bool:
    try:
        storage.data_ptr()
    except RuntimeError:  # torch's answer for a wrapper subclass
        return False
    return True


def local_tensor(tensor: torch.Tensor, *, is_offloaded: Callable[[torch.Tensor], bool]) -> torch.Tensor:
    """Return the tensor with the values of ``tensor``: the local part of a DTensor, else ``tensor`` itself.

    Raises :class:`~hwrl.errors.MemoryStateError` if ``tensor`` has several parts and one ``is_offloaded``.
    """
    tensors = list(stored_tensors([("", tensor)]))
    kind = next(
        (stored.wrapper_class for stored in tensors if stored.wrapper_class and is_offloaded(stored.tensor)), None
    )
    if kind is not None:
        raise MemoryStateError(
            f"the host's copy of a tensor of class {kind} cannot be lent",
            why="it has several parts, and only its class can put them together",
            fix="read it inside `with offloader.loaded():`",
        )
    return tensors[0].tensor if len(tensors) == 1 else tensor


def own_memory(model: nn.Module) -> None:
    """Copy each parameter and buffer whose memory cannot be freed: it belongs to a file, an array or another process.

    The tensors stay the same objects; equal views of one memory share the copy. transformers' ``from_pretrained`` maps
    its files on the CPU. Tensors of other classes than torch's own stay as they are.
    """
    copies: dict[tuple[object, ...], torch.Tensor] = {}
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.untyped_storage().resizable():
            continue
        view = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if view not in copies:
            copies[view] = tensor.detach().clone()
        tensor.data = copies[view]


def require_resizing(device: torch.device) -> None:
    """Raise :class:`~hwrl.errors.MemoryStateError` if storages on ``device`` cannot be freed and allocated again."""
    storage = torch.empty(1, dtype=torch.uint8, device=device).untyped_storage()
    try:
        storage.resize_(0)
        storage.resize_(1)
    except RuntimeError as exc:
        raise MemoryStateError(
            f"nothing on {device} can be offloaded",
            why=f"UntypedStorage.resize_ does not work there: {exc}",
            fix="the device's package for torch must implement it, or set param_offload and optimizer_offload to false",
        ) from exc
