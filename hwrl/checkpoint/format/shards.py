"""A tensor of which a rank holds arbitrary rectangles: :class:`LocalShards`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

Offset = tuple[int, ...]
Part = tuple[str, Offset | None]
"""A tensor's name, and which of its pieces it is, if it is in pieces."""


class LocalShards(torch.Tensor):
    """This rank's part of a tensor of ``shape``: rectangles by the offset at which they lie in it, none or many.

    Goes into a state for :class:`~hwrl.checkpoint.CheckpointManager` where a tensor is divided in a way that no
    DTensor describes. The rectangles are the caller's memory, and a load fills them; those of all ranks together must
    cover the tensor, and a rectangle that several ranks hold must be the same one on each. It is no tensor to compute
    with.
    """

    pieces: dict[Offset, torch.Tensor]

    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, pieces: Mapping[Offset, torch.Tensor]) -> LocalShards:
        """Make it; nothing is copied."""
        self = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype)
        self.pieces = dict(pieces)
        if 0 in shape:  # a tensor without elements is one rectangle, or no rank would have anything of it
            self.pieces = {(0,) * len(shape): torch.empty(shape, dtype=dtype, device="cpu")}
        return self

    @classmethod
    def __torch_dispatch__(cls, operation: Any, *_: Any) -> NoReturn:
        raise TypeError(f"{operation} cannot be applied to LocalShards: they are for checkpoints only")

    def __repr__(self) -> str:  # type: ignore[override] # torch's takes arguments that nobody gives
        return f"LocalShards({list(self.shape)}, {self.dtype}, {len(self.pieces)} here)"

    # -- what torch's checkpoint planners ask for ---------------------------------------------------------------

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
        assert index.offset is not None, "every item that this class makes has one"
        return self.pieces[tuple(index.offset)]


@torch.no_grad()
def local_parts(state: Mapping[str, Any]) -> list[tuple[Part, torch.Tensor]]:
    """Return what this rank has of each tensor of a flat state, detached: its part of it, or each of its pieces."""
    parts: list[tuple[Part, torch.Tensor]] = []
    for name, value in state.items():
        if isinstance(value, LocalShards):
            parts += [((name, offset), piece) for offset, piece in value.pieces.items()]
        elif isinstance(value, torch.Tensor):
            parts.append(((name, None), value.to_local() if isinstance(value, DTensor) else value.detach()))
    return parts
