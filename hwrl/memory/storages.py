"""Where the memory of a model and of an optimizer lies: :func:`pieces_of`, :func:`storages_of`."""

from __future__ import annotations

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
from hwrl.memory.guards import Offloaded

_PLAIN = (torch.Tensor, nn.Parameter, Buffer, Offloaded)
_NO_STATE = (type, FunctionType, ModuleType, nn.Module, Optimizer)

Named = Iterable[tuple[str, torch.Tensor]]
"""Tensors, and their names for people."""


@dataclass(frozen=True)
class Piece:
    """A tensor with a storage of its own. ``versions`` also counts the writes to the tensors around it.

    ``around`` is the class of a tensor that is more than this piece and that hwrl does not know; else None.
    """

    name: str
    tensor: torch.Tensor
    versions: tuple[int, ...]
    around: str | None

    @property
    def storage_key(self) -> int:
        """The same for tensors that share memory."""
        return self.tensor.untyped_storage()._cdata if self.tensor.layout is torch.strided else id(self.tensor)


@dataclass(frozen=True)
class Placed:
    """A storage, and the pieces that share it."""

    storage: torch.UntypedStorage
    pieces: tuple[Piece, ...]

    @property
    def versions(self) -> tuple[int, ...]:
        """The version counters of all tensors that share the storage."""
        return tuple(version for piece in self.pieces for version in piece.versions)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of ``model``; FSDP2 modules are resharded first."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # a root that only ran forward still holds its whole parameters
    yield from model.named_parameters()
    yield from model.named_buffers()


def optimizer_tensors(optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in the optimizers' states, and the parameters that they update."""
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        for state in list(optimizer.state.values()):
            yield from _tensors_in(state, f"{kind}.state", set())
        for group in optimizer.param_groups:  # copies of its own, in float32; the model's parameters are set apart
            yield from ((f"{kind}.param_groups", parameter) for parameter in group["params"])


def pieces_of(named: Named) -> Iterator[Piece]:
    """Divide tensors into those that have storages: of a wrapper subclass, the tensors that it flattens into.

    Other subclasses may keep tensors in their attributes, as scales of quantized weights; these are pieces too.
    """
    for name, tensor in named:
        yield from _pieces(name, tensor, (), None)


def _pieces(name: str, tensor: torch.Tensor, versions: tuple[int, ...], around: str | None) -> Iterator[Piece]:
    if is_lazy(tensor):
        return  # no memory yet
    versions = (*versions, -1 if tensor.is_inference() else tensor._version)
    if is_traceable_wrapper_subclass(tensor):
        around = around if isinstance(tensor, DTensor) else type(tensor).__name__
        for attribute in tensor.__tensor_flatten__()[0]:
            inner = getattr(tensor, attribute)
            if isinstance(inner, torch.Tensor):
                yield from _pieces(f"{name}.{attribute}", inner, versions, around)
        return
    hidden = list(_hidden_in(tensor, name))
    around = type(tensor).__name__ if hidden else around
    yield Piece(name, tensor, versions, around)
    for path, one in hidden:
        yield from _pieces(path, one, versions, around)


def _hidden_in(tensor: torch.Tensor, name: str) -> Named:
    """Return the tensors in the attributes of a subclass; not gradients, as these are never moved."""
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
    """Return whether ``value`` is somebody's object: torch's own, as meshes and groups, own the tensors in them."""
    torchs = type(value).__module__.partition(".")[0] == "torch"
    return hasattr(value, "__dict__") and not torchs and not isinstance(value, _NO_STATE)


def storages_of(pieces: Iterable[Piece], part: str, *, device_type: str) -> list[Placed]:
    """Return each storage on the device once.

    Raises :class:`~hwrl.errors.MemoryStateError`, with the tensor's name, if its memory cannot be moved.
    """
    found: dict[int, list[Piece]] = {}
    storages: dict[int, torch.UntypedStorage] = {}
    for piece in pieces:
        if piece.tensor.device.type != device_type:
            continue
        storage = _movable_storage(piece, part)
        if storage.nbytes():
            storages[piece.storage_key] = storage
            found.setdefault(piece.storage_key, []).append(piece)
    return [Placed(storage, tuple(found[key])) for key, storage in storages.items()]


def _movable_storage(piece: Piece, part: str) -> torch.UntypedStorage:
    tensor = piece.tensor
    if tensor.layout is not torch.strided:
        _refuse(part, piece, why=f"is a {tensor.layout} tensor", fix="replace it by its to_dense()")
    storage = tensor.untyped_storage()
    if not _has_address(storage):
        kind = type(tensor).__qualname__
        why = f"is a {kind}, whose memory cannot be found"
        _refuse(part, piece, why=why, fix=f"give {kind} __tensor_flatten__ and __tensor_unflatten__, or don't offload")
    if not storage.resizable():
        why = f"has {storage.nbytes():,} bytes that belong to a file, an array or another process"
        fix = "give each parameter and buffer memory of its own: tensor.data = tensor.data.clone()"
        _refuse(part, piece, why=why, fix=fix)
    return storage


def _refuse(part: str, piece: Piece, *, why: str, fix: str) -> NoReturn:
    raise MemoryStateError(f"the {part} cannot be offloaded", why=f"{piece.name} {why}", fix=fix)


def _has_address(storage: torch.UntypedStorage) -> bool:
    try:
        storage.data_ptr()
    except RuntimeError:  # torch's answer for a wrapper subclass
        return False
    return True


def whole(tensor: torch.Tensor, *, is_away: Callable[[torch.Tensor], bool]) -> torch.Tensor:
    """Return the tensor that has the values of ``tensor``: the local part of a DTensor, else ``tensor`` itself.

    Raises :class:`~hwrl.errors.MemoryStateError` if it is made of several of which one ``is_away``.
    """
    pieces = list(pieces_of([("", tensor)]))
    kind = next((piece.around for piece in pieces if piece.around and is_away(piece.tensor)), None)
    if kind is not None:
        raise MemoryStateError(
            f"the host's copy of a tensor of class {kind} cannot be lent",
            why="it is made of several tensors that only the class can put together",
            fix="read it inside `with offloader.loaded():`",
        )
    return pieces[0].tensor if len(pieces) == 1 else tensor


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
