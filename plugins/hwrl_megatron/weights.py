"""This rank's parts of the saved tensors, in the parameters of a GPTModel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hwrl_megatron.layout import Layout, SavedTensor, head_size, saved_tensors


@dataclass(frozen=True)
class MappedWeight:
    """The part ``rank`` of ``ranks`` of a saved tensor: ``view``, a view of ``parameter``.

    ``view`` may have more dimensions than the tensor; the additional ones divide its rows, such as (heads, head size).
    An undivided tensor is one part.
    """

    saved: SavedTensor
    parameter: nn.Parameter
    view: torch.Tensor
    rank: int
    ranks: int

    def dense(self) -> torch.Tensor:
        """Return this rank's part in the tensor's shape, without a copy if ``view`` is contiguous."""
        return self.view.reshape(self.local_shape())

    def slices(self) -> tuple[slice, ...]:
        """Return where this rank's part lies in the saved tensor."""
        local = self.local_shape()
        starts = [self.rank * size if dim == self.saved.dim else 0 for dim, size in enumerate(local)]
        return tuple(slice(start, start + size) for start, size in zip(starts, local, strict=True))

    def own_slices(self) -> tuple[slice, ...]:
        """Return where this rank's part lies in transformers' tensor, ``saved.own_name``."""
        packed = len(self.saved.offset) - len(self.saved.shape)
        begins = self.saved.offset[packed:]
        experts = [slice(at, at + 1) for at in self.saved.offset[:packed]]
        mine = [slice(at + part.start, at + part.stop) for at, part in zip(begins, self.slices(), strict=True)]
        return (*experts, *mine)

    def load(self, part: torch.Tensor) -> None:
        """Copy ``part``, the :meth:`slices` of the saved tensor, into the parameter."""
        self.view.copy_(part.reshape(self.view.shape))

    def rectangles(self, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], slice, tuple[int, ...]]]:
        """Divide elements ``start`` to ``stop`` of the flat parameter into rectangles of transformers' tensor.

        Elements of other saved tensors are left out. Yield each rectangle's offset in the tensor, its elements of the
        flat parameter, and its shape.
        """
        runs = [self.view] if self.view.is_contiguous() else list(self.view)
        shape = self.local_shape()
        rows = shape[0] // len(runs)
        packed = len(self.saved.offset) - len(shape)  # the expert's dimension
        begins = self.saved.offset[packed:]
        for number, run in enumerate(runs):
            begin = int(run.storage_offset() - self.parameter.storage_offset())
            first, last = max(start, begin) - begin, min(stop, begin + run.numel()) - begin
            for offset, size in _rectangles((rows, *shape[1:]), first, last):
                place = [offset[0] + number * rows, *offset[1:]]
                if self.saved.dim is not None:
                    place[self.saved.dim] += self.rank * shape[self.saved.dim]
                place = [own + at for own, at in zip(begins, place, strict=True)]
                length = torch.Size(size).numel()
                whole = (*self.saved.offset[:packed], *place), (*(1,) * packed, *size)
                yield whole[0], slice(begin + first, begin + first + length), whole[1]
                first += length

    def local_shape(self) -> tuple[int, ...]:
        """Return the shape of this rank's part."""
        return tuple(size // self.ranks if dim == self.saved.dim else size for dim, size in enumerate(self.saved.shape))


def _rectangles(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Divide elements ``start`` to ``stop`` of a tensor of one or two dimensions into rectangles: offset and shape.

    >>> list(_rectangles((4, 10), 7, 35))
    [((0, 7), (1, 3)), ((1, 0), (2, 10)), ((3, 0), (1, 5))]
    """
    if len(shape) == 1 and start < stop:
        yield (start,), (stop - start,)
        return
    while start < stop:
        row, column = divmod(start, shape[1])
        rows = 0 if column else (stop - start) // shape[1]
        size = (rows, shape[1]) if rows else (1, min(shape[1] - column, stop - start))
        yield (row, column), size
        start += size[0] * size[1]


def map_weights(model: nn.Module, config: Any, layout: Layout) -> list[MappedWeight]:
    """Return this rank's part of each saved tensor, copies included; ``model`` is its GPTModel."""
    parameters = dict(model.named_parameters())
    weights = []
    for saved in saved_tensors(config, layout):
        if saved.is_on(layout):
            parameter = parameters[saved.parameter]
            view = _view(saved.part, parameter.detach(), config)
            ranks = 1 if saved.dim is None else layout.tensor
            weights.append(MappedWeight(saved, parameter, view, layout.tensor_rank, ranks))
    return weights


def _view(part: str, data: torch.Tensor, config: Any) -> torch.Tensor:
    """Return ``part`` as a view of its parameter; the parameter itself if it holds one saved tensor."""
    if part in ("gate", "up"):
        return data.chunk(2)[part == "up"]
    if not part:
        return data
    queries = config.num_attention_heads // config.num_key_value_heads
    heads = data.view(-1, queries + 2, head_size(config), *data.shape[1:])  # for each key-value head
    return {"query": heads[:, :queries], "key": heads[:, queries], "value": heads[:, queries + 1]}[part]
