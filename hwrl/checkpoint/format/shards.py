"""Tensors divided into arbitrary rectangles: :class:`LocalShards`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Offset = tuple[int, ...]
PartKey = tuple[str, Offset | None]
"""A part of a rank's state: the name of its tensor, and its offset if the tensor is a :class:`LocalShards`."""


class LocalShards(torch.Tensor):
    """This rank's part of a tensor of ``shape``: any number of rectangles, by their offset in the tensor.

    Put it into a state for :class:`~hwrl.checkpoint.CheckpointManager` if no DTensor describes how the tensor is
    divided. The rectangles are the caller's memory, and a load fills them. All ranks together must cover the tensor.
    Rectangles of several ranks may be equal, but must not overlap otherwise. It supports no operation of torch.
    """

    pieces: dict[Offset, torch.Tensor]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Mapping[Offset, torch.Tensor]) -> LocalShards:
        """Create it without a copy."""
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        self.pieces = dict(pieces)
        if 0 in shape:  # an empty tensor is one empty rectangle; otherwise no rank would save it
            self.pieces = {(0,) * len(shape): torch.empty(shape, dtype=dtype, device="cpu")}
        return self

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operation} cannot be applied to LocalShards: they are for checkpoints only")

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
        assert index.offset is not None, "every item of this class has one"
        return self.pieces[tuple(index.offset)]


@torch.no_grad()
def local_parts(state: Mapping[str, Any]) -> list[tuple[PartKey, torch.Tensor]]:
    """Return this rank's part of each tensor of a flat state, detached: one part, or each rectangle."""
    parts: list[tuple[PartKey, torch.Tensor]] = []
    for name, value in state.items():
        if isinstance(value, LocalShards):
            parts += [((name, offset), piece.detach()) for offset, piece in value.pieces.items()]
        elif isinstance(value, torch.Tensor):
            local = value.to_local() if isinstance(value, DTensor) else value
            parts.append(((name, None), local.detach()))
    return parts
