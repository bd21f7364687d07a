"""A rank's tensors in a state: :func:`local_tensors`, and :class:`LocalShards` for a tensor that no DTensor describes.

A rectangle is a box of elements in any number of dimensions, given by its offset and its shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

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

    # -- torch's checkpoint planners call these -----------------------------------------------------------------

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

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
