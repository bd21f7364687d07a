"""The Hugging Face tensors in the parameters of a GPTModel, and this rank's part of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hwrl.weights import WeightShard

_ROWS, _COLUMNS = 0, 1
_PLAIN = {
    "embedding.word_embeddings.weight": ("model.embed_tokens.weight", _ROWS),
    "decoder.final_layernorm.weight": ("model.norm.weight", None),
    "output_layer.weight": ("lm_head.weight", _ROWS),
    "input_layernorm.weight": ("input_layernorm.weight", None),
    "self_attention.q_layernorm.weight": ("self_attn.q_norm.weight", None),
    "self_attention.k_layernorm.weight": ("self_attn.k_norm.weight", None),
    "self_attention.linear_proj.weight": ("self_attn.o_proj.weight", _COLUMNS),
    "pre_mlp_layernorm.weight": ("post_attention_layernorm.weight", None),
    "mlp.linear_fc2.weight": ("mlp.down_proj.weight", _COLUMNS),
}
"""Parameters with one Hugging Face tensor each, and the dimension that tensor parallelism divides."""


@dataclass(frozen=True)
class MappedWeight:
    """A Hugging Face tensor ``name`` of ``shape``, and this rank's part of it: ``view``, a view of ``parameter``.

    The leading dimensions of ``view`` together are the part's rows. The part is the whole tensor (``dim`` None), or
    part ``rank`` of ``ranks`` equal parts along ``dim``.
    """

    name: str
    parameter: nn.Parameter
    view: torch.Tensor
    shape: tuple[int, ...]
    dim: int | None
    rank: int
    ranks: int

    def part(self) -> torch.Tensor | WeightShard:
        """Return this rank's part; ``view`` itself if it is dense."""
        mine = self.view.reshape(self._local_shape())
        return mine if self.dim is None or self.ranks == 1 else WeightShard(mine, self.shape, self.dim, self.ranks)

    def load(self, whole: torch.Tensor) -> None:
        """Copy this rank's part of ``whole`` into the parameter."""
        part = whole if self.dim is None else whole.chunk(self.ranks, self.dim)[self.rank]
        self.view.copy_(part.reshape(self.view.shape))

    def rectangles(self, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], slice, tuple[int, ...]]]:
        """Map elements ``start`` to ``stop`` of the flat parameter to rectangles of the tensor.

        Yield each rectangle's offset in the tensor, its elements of the flat parameter, and its shape.
        """
        runs = [self.view] if self.view.is_contiguous() else list(self.view)
        shape = self._local_shape()
        rows = shape[0] // len(runs)
        for number, run in enumerate(runs):
            begin = int(run.storage_offset() - self.parameter.storage_offset())
            first, last = max(start, begin) - begin, min(stop, begin + run.numel()) - begin
            for offset, size in _rectangles((rows, *shape[1:]), first, last):
                place = [offset[0] + number * rows, *offset[1:]]
                if self.dim is not None:
                    place[self.dim] += self.rank * shape[self.dim]
                length = torch.Size(size).numel()
                yield tuple(place), slice(begin + first, begin + first + length), size
                first += length

    def _local_shape(self) -> tuple[int, ...]:
        return tuple(size // self.ranks if dim == self.dim else size for dim, size in enumerate(self.shape))


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


def map_weights(model: nn.Module, config: Any, *, rank: int, ranks: int) -> list[MappedWeight]:
    """Return every tensor of the Hugging Face model with this ``config``, and its parameter in the GPTModel.

    ``rank`` and ``ranks`` are the rank in the tensor-parallel group and its size.
    """
    weights = []
    for name, parameter in model.named_parameters():
        prefix, own = _split_name(name)
        for hf_name, view, dim in _views(own, parameter, config):
            shape = _hf_shape(view, parameter)
            if dim is not None:
                shape[dim] *= ranks
            weights.append(MappedWeight(prefix + hf_name, parameter, view, tuple(shape), dim, rank, ranks))
    return weights


def head_size(config: Any) -> int:
    """Return the size of an attention head of the Hugging Face model with this ``config``."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def load_weights(weights: list[MappedWeight], whole: Mapping[str, torch.Tensor]) -> None:
    """Copy this rank's parts of the tensors ``whole`` into the model."""
    with torch.no_grad():
        for weight in weights:
            weight.load(whole[weight.name])


def _split_name(name: str) -> tuple[str, str]:
    layer = re.match(r"decoder\.layers\.(\d+)\.", name)
    return (f"model.layers.{layer[1]}.", name[layer.end() :]) if layer else ("", name)


def _views(name: str, parameter: nn.Parameter, config: Any) -> Iterator[tuple[str, torch.Tensor, int | None]]:
    """Yield the Hugging Face tensors in ``parameter``: name, view of the parameter, divided dimension."""
    data = parameter.detach()
    kind = name.rpartition(".")[2]
    if name.startswith("self_attention.linear_qkv."):  # for each key-value head: its queries, its key, its value
        queries = config.num_attention_heads // config.num_key_value_heads
        heads = data.view(-1, queries + 2, head_size(config), *data.shape[1:])
        yield f"self_attn.q_proj.{kind}", heads[:, :queries], _ROWS
        yield f"self_attn.k_proj.{kind}", heads[:, queries], _ROWS
        yield f"self_attn.v_proj.{kind}", heads[:, queries + 1], _ROWS
    elif name == "mlp.linear_fc1.weight":
        gate, up = data.chunk(2)
        yield "mlp.gate_proj.weight", gate, _ROWS
        yield "mlp.up_proj.weight", up, _ROWS
    else:
        hf_name, dim = _PLAIN[name]
        yield hf_name, data, dim


def _hf_shape(view: torch.Tensor, parameter: nn.Parameter) -> list[int]:
    """Return the shape of this rank's part: the leading dimensions of ``view`` merge into rows."""
    return [view.numel() // parameter.shape[1:].numel(), *parameter.shape[1:]]
