"""A rank's tensors in a state, and the items that a save writes: :func:`local_tensors`, :func:`list_items`.

A rectangle is a box of elements in any number of dimensions, given by its offset and its shape.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # torch's planners use the same names
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.tensor import DTensor

from hwrl.checkpoint.layout import Json, StatePath
from hwrl.errors import CheckpointError, MemoryStateError

MAX_ITEM_NBYTES = 32 << 20
"""The largest item. Each writing thread of a save reads one item at a time, and a load reads one into memory."""

Offset = tuple[int, ...]
LocalKey = tuple[str, Offset | None]
"""Identifies one local tensor of a rank: its name, and its offset if it is a rectangle of a :class:`LocalShards`."""


class LocalShards(torch.Tensor):
    """This rank's rectangles of a tensor with ``shape``. ``pieces`` maps the offset of each rectangle to its elements.

    Put it into a state for :class:`~hwrl.checkpoint.CheckpointManager` if no DTensor can describe the sharding. The
    rectangles stay the caller's memory: a save reads them, and a load fills them in place. The rectangles of all ranks
    must cover the tensor. Two ranks may have the same rectangle, but rectangles must not overlap otherwise. This class
    supports no operation of torch.
    """

    pieces: dict[Offset, torch.Tensor]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Mapping[Offset, torch.Tensor]) -> LocalShards:
        """Create the tensor. The rectangles are not copied."""
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        self.pieces = dict(pieces)
        if 0 in shape:  # without any rectangle, no rank would save the empty tensor
            self.pieces = {(0,) * len(shape): torch.empty(shape, dtype=dtype, device="cpu")}
        return self

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operation} cannot be applied to LocalShards, which are for checkpoints only")

    def __repr__(self) -> str:  # type: ignore[override] # torch's has more parameters
        return f"LocalShards({list(self.shape)}, {self.dtype}, {len(self.pieces)} here)"

    # -- torch's load planner calls these -----------------------------------------------------------------------

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offset), piece.shape) for offset, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None, "every item of a LocalShards has an offset"
        return self.pieces[tuple(index.offset)]


@torch.no_grad()
def local_tensors(state: Mapping[str, Any]) -> list[tuple[LocalKey, torch.Tensor]]:
    """Return this rank's local tensors of a flat state, detached.

    A plain tensor is returned itself, a DTensor as its local shard, and a LocalShards as one tensor for each rectangle.
    """
    tensors: list[tuple[LocalKey, torch.Tensor]] = []
    for name, value in state.items():
        if isinstance(value, LocalShards):
            tensors += [((name, offset), piece.detach()) for offset, piece in value.pieces.items()]
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            tensors.append(((name, None), local.detach()))
    return tensors


def flatten(state: Mapping[str, Any], error: type[CheckpointError]) -> tuple[dict[str, Any], dict[str, StatePath]]:
    """Return the values of a nested state by flat name, and the path of each. Raise ``error`` for an equal name."""
    try:
        return flatten_state_dict(dict(state))
    except ValueError as exc:
        raise error(
            "the state has two values with the same name",
            why=str(exc),
            fix='rename one of them: {"a": {"b": …}} and {"a.b": …} have the same name in a checkpoint',
        ) from exc


def is_offloaded(tensor: torch.Tensor) -> bool:
    """Return whether the storage of ``tensor`` is empty, and the tensor is not."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def offloaded_error(name: str) -> MemoryStateError:
    """Return the error for a tensor whose storage is empty."""
    return MemoryStateError(
        f"{name!r} has no storage",
        why="the tensor is offloaded",
        fix="save with the `offloader=` that holds it; or save and resume inside `with offloader.loaded():`",
    )


# -- items ----------------------------------------------------------------------------------------------------------


class SaveItem(NamedTuple):
    """What is written at once: one chunk of a tensor (a rectangle of its elements), or one non-tensor value.

    ``entry`` describes it in the layout file, except for its place. Of a tensor, ``key`` is the local tensor, and the
    item begins at ``begin`` in it.
    """

    entry: Json
    nbytes: int = 0
    key: LocalKey | None = None
    begin: Offset = ()


def list_items(state: Mapping[str, Any], paths: Mapping[str, StatePath], *, max_nbytes: int) -> list[SaveItem]:
    """Return the items of a rank's flat state. ``paths`` has the place of each name in the nested state.

    An item has at most ``max_nbytes``. How a tensor is divided depends on shape and dtype only, so all ranks with the
    same tensor divide it in the same way.
    """
    items = []
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            items.append(SaveItem({"name": name, "kind": "BYTE_IO", "keys": list(paths[name])}))
            continue
        if isinstance(value, DTensor) and value.device_mesh.get_coordinate() is None:
            continue  # this rank has no part of it
        chunks = [ChunkStorageMetadata(torch.Size([0] * value.ndim), value.shape)]
        if is_sharded := isinstance(value, DTensor | LocalShards):
            chunks = value.__create_chunk_list__()
        for chunk in chunks:
            if 0 in chunk.sizes and 0 not in value.shape:
                continue  # another rank may have a shard with elements and the same offset
            key = (name, tuple(chunk.offsets) if isinstance(value, LocalShards) else None)
            parts = list(divide(tuple(chunk.sizes), value.dtype.itemsize, max_nbytes=max_nbytes))
            for begin, sizes in parts:
                entry = {
                    "name": name,
                    "kind": "SHARD" if is_sharded or len(parts) > 1 else "TENSOR",
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "shape": list(value.shape),
                    "offsets": [at + start for at, start in zip(chunk.offsets, begin, strict=True)],
                    "sizes": list(sizes),
                    "keys": list(paths[name]),
                }
                items.append(SaveItem(entry, math.prod(sizes) * value.dtype.itemsize, key, begin))
    return items


def divide(shape: Offset, itemsize: int, *, max_nbytes: int) -> Iterator[tuple[Offset, Offset]]:
    """Divide ``shape`` into rectangles of at most ``max_nbytes``. Yield the offset and sizes of each.

    If a tensor is contiguous, the elements of each rectangle are contiguous, too.
    """
    numel = max(1, max_nbytes // itemsize)
    if math.prod(shape) <= numel:
        yield (0,) * len(shape), shape
        return
    axis = next(axis for axis in range(len(shape)) if math.prod(shape[axis + 1 :]) <= numel)
    rows = numel // math.prod(shape[axis + 1 :])
    inner = (0,) * (len(shape) - axis - 1)
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], rows):
            yield (*outer, start, *inner), (*(1,) * axis, min(rows, shape[axis] - start), *shape[axis + 1 :])


def assign(entries: Sequence[Sequence[Json]]) -> list[list[int]]:
    """Assign each item to one of the ranks that have it. Return for each rank the positions of its items.

    ``entries`` has those of each rank's items. The rank with the fewest bytes to write gets a chunk. A non-tensor value
    goes to the lowest rank with its name, because different ranks may have different values.
    """
    holders: dict[tuple[Any, ...], dict[int, int]] = {}
    for rank, of_rank in enumerate(entries):
        for position, entry in enumerate(of_rank):
            kind = (entry.get("dtype"), *entry.get("shape", ()))  # if ranks disagree, both are written, and refused
            holders.setdefault((entry["name"], *kind, *entry.get("offsets", ["value"])), {})[rank] = position
    positions: list[list[int]] = [[] for _ in entries]
    nbytes = [0] * len(entries)
    for held in holders.values():
        rank = min(held)
        entry = entries[rank][held[rank]]
        if "sizes" in entry:
            rank = min(held, key=nbytes.__getitem__)
            nbytes[rank] += math.prod(entry["sizes"]) * getattr(torch, entry["dtype"]).itemsize or 1
        positions[rank].append(held[rank])
    return [sorted(own) for own in positions]
