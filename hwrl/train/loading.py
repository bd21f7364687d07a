"""Give an engine's model its memory and its weights: each rank allocates and reads its own part only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, Shard

from hwrl.errors import ConfigError, DataError
from hwrl.interfaces import Backend
from hwrl.lora import adapter_name, base_name
from hwrl.model_files import ModelFiles
from hwrl.models import build_meta_model, load_model

if TYPE_CHECKING:
    from hwrl.comm import Group

VALUE_WEIGHT = "value_weight"
"""The name of a critic's output weights in their layer: no file has them."""

_log = logging.getLogger("hwrl.train")


class WeightReader(Protocol):
    """Reads parts of a model's parameters and buffers; :class:`~hwrl.model_files.ModelFiles` is one."""

    def read(self, name: str, out: torch.Tensor, *, dim: int = 0, start: int = 0) -> None:
        """Fill ``out`` with the values of ``name`` from ``start`` on along ``dim``, in its shape, dtype and device."""


def open_model(
    directory: Path,
    *,
    group: Group | None,
    backend: Backend,
    level: int = logging.WARNING,
    max_length: int | None = None,
) -> tuple[Any, WeightReader]:
    """Return the model in ``directory`` on the meta device, in float32, and the reader of its weights.

    ``max_length`` is that of :func:`~hwrl.models.build_model`. The model is in evaluation mode. Each rank of ``group``
    reads its own parts from safetensors files. If a rank has no such files, or transformers must convert them, the
    first rank loads the whole model, and each read is a broadcast. Then all ranks must read the same names in the same
    order. A log line at ``level`` says so. Collective; raises DataError on all ranks if the files do not fit the model.
    """
    model, files, error = None, None, None
    try:
        model = build_meta_model(directory, dtype=torch.float32, max_length=max_length).eval()
        files = ModelFiles(directory, model)
    except (ConfigError, DataError) as exc:
        error = exc
    raise_on_all_ranks(error, group, backend, directory=directory)
    assert files is not None, "there was no error"
    if not _on_any_rank(group, backend, mine=files.why_whole is not None):
        return model, files
    why = files.why_whole or "another rank cannot read it by parts"
    _log.log(level, "one rank reads all of %s and sends the others their parts: %s", directory, why)
    return model, _FirstRanksModel(directory, model, group, backend)


class _FirstRanksModel:
    """The model as transformers loads it, whole, on the first rank; the others get their parts by broadcasts."""

    def __init__(self, directory: Path, model: Any, group: Group | None, backend: Backend) -> None:
        self._described = model.state_dict()
        self._whole: dict[str, torch.Tensor] = {}
        self._group, self._device = group, backend.device()
        error = None
        if group is None or group.rank == 0:
            try:
                self._whole = load_model(directory, dtype=torch.float32).state_dict()
            except DataError as exc:
                error = exc
        raise_on_all_ranks(error, group, backend, directory=directory)

    @torch.no_grad()
    def read(self, name: str, out: torch.Tensor, *, dim: int = 0, start: int = 0) -> None:
        whole = self._whole.get(name)
        if self._group is not None:
            shape, dtype = self._described[name].shape, self._described[name].dtype
            own = torch.empty(shape, dtype=dtype) if whole is None else whole
            whole = own.to(self._device, dtype).contiguous()
            self._group.broadcast(whole, src=0)
        assert whole is not None, "the only rank has the whole model"
        out.copy_(whole.narrow(dim, start, out.shape[dim]) if out.dim() else whole)


def raise_on_all_ranks(error: Exception | None, group: Group | None, backend: Backend, *, directory: Path) -> None:
    """Raise ``error`` on this rank, and a DataError on the ranks of ``group`` without one. Collective."""
    failed = _on_any_rank(group, backend, mine=error is not None)
    if error is not None:
        raise error
    if failed:
        raise DataError(
            f"another rank cannot load the model in {directory}",
            why="that rank's error has the reason",
            fix="read the first error of the other ranks",
        )


def _on_any_rank(group: Group | None, backend: Backend, *, mine: bool) -> bool:
    """Return whether ``mine`` is true on any rank. Collective."""
    if group is None:
        return mine
    word = torch.tensor([float(mine)], device=backend.device())
    group.all_reduce(word, op="max")
    return bool(word.item())


@torch.no_grad()
def read_weights(model: Any, reader: WeightReader, *, directory: Path, group: Group | None, backend: Backend) -> None:
    """Fill the parameters and persistent buffers of ``model`` from ``reader``.

    The parameters of an adapter and of a critic's output layer are in no file, and keep their values. Collective: if
    one rank fails, all raise DataError.
    """

    def read() -> None:
        for name, tensor in _saved_tensors(model):
            own, dim, start = own_slice(tensor)
            reader.read(base_name(name), own, dim=dim, start=start)

    read_on_all_ranks(read, directory=directory, group=group, backend=backend)


def read_on_all_ranks(read: Callable[[], None], *, directory: Path, group: Group | None, backend: Backend) -> None:
    """Let ``read`` read the weights in ``directory``. Collective: if one rank fails, all raise DataError."""
    error: DataError | None = None
    try:
        read()
    except DataError as exc:
        error = exc
    except (OSError, SafetensorError) as exc:
        error = DataError(
            f"the weights in {directory} cannot be read", why=str(exc), fix="repair the disk; or save the model again"
        )
        error.__cause__ = exc
    raise_on_all_ranks(error, group, backend, directory=directory)


def _saved_tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if adapter_name(name) is None and not name.endswith(f".{VALUE_WEIGHT}"):
            yield name, parameter
    yield from persistent_buffers(model)


def persistent_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers of ``model`` that its state dict has, with their names."""
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in module._non_persistent_buffers_set:
                yield name, buffer


def own_slice(tensor: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """Return this rank's part of ``tensor``, the divided dimension, and the index in it at which the part begins.

    A part shares the memory of ``tensor``. A tensor that is not sharded is its own part. FSDP2 divides one dimension
    into parts of equal size, rounded up.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), 0, 0
    for mesh_dim, placement in enumerate(tensor.placements):
        if isinstance(placement, Shard):
            length = tensor.shape[placement.dim]
            size = -(-length // tensor.device_mesh.size(mesh_dim))
            start = min(length, size * tensor.device_mesh.get_local_rank(mesh_dim))
            return tensor.to_local().detach(), placement.dim, start
    return tensor.to_local().detach(), 0, 0


def allocate(model: torch.nn.Module, *, device: torch.device) -> None:
    """Give each parameter of ``model`` on the meta device memory on ``device``, with arbitrary values.

    Tied parameters stay tied. Other parameters and buffers stay where they are.
    """
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
    for (first, name), *others in places.values():
        for module, other in others:
            module._parameters[other] = first._parameters[name]
