"""The models that ``hwrl bench weights`` can send: the names, shapes and dtypes of their tensors. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator

Description = tuple[str, tuple[int, ...], str]
"""A tensor's name, shape and dtype."""
Shapes = dict[str, tuple[int, ...]]

_HIDDEN, _INTERMEDIATE, _KEY_VALUE = 896, 4864, 128  # the shapes of a common half-billion-parameter model
_LAYER: Shapes = {
    "q": (_HIDDEN, _HIDDEN),
    "q_bias": (_HIDDEN,),
    "k": (_KEY_VALUE, _HIDDEN),
    "v": (_KEY_VALUE, _HIDDEN),
    "o": (_HIDDEN, _HIDDEN),
    "gate": (_INTERMEDIATE, _HIDDEN),
    "up": (_INTERMEDIATE, _HIDDEN),
    "down": (_HIDDEN, _INTERMEDIATE),
    "norm": (_HIDDEN,),
}


def _of(shapes: Shapes, dtype: str = "bfloat16", *, prefix: str = "") -> Iterator[Description]:
    yield from ((prefix + name, shape, dtype) for name, shape in shapes.items())


def _awkward(nbytes: int) -> Iterator[Description]:
    """Mostly bfloat16 matrices, as in a language model, and one tensor of each kind that transfers get wrong."""
    yield from _of({"embed": (max(1, nbytes // 5 // (2 * _HIDDEN)), _HIDDEN), "odd": (1001,), "empty": (0, 4)})
    yield from _of({"scale": (), "strided": (77, 9)}, "float32")
    yield from _of({"transposed": (_HIDDEN, 333)})
    yield "step", (3,), "int64"
    yield "bytes", (13,), "uint8"
    layer_nbytes = 2 * sum(math.prod(shape) for shape in _LAYER.values())
    for layer in range(math.ceil(nbytes * 4 // 5 / layer_nbytes)):
        yield from _of(_LAYER, prefix=f"layers.{layer}.")


def _dense(_: int) -> Iterator[Description]:
    """399 tensors, 16.4 GB: the shapes of an 8-billion-parameter model."""
    layer: Shapes = {"q": (4096, 4096), "k": (1024, 4096), "v": (1024, 4096), "o": (4096, 4096), "q_norm": (128,)}
    layer |= {"k_norm": (128,), "gate": (12288, 4096), "up": (12288, 4096), "down": (4096, 12288)}
    layer |= {"input_norm": (4096,), "post_norm": (4096,)}
    yield from _of({"embed": (151936, 4096)})
    for number in range(36):
        yield from _of(layer, prefix=f"layers.{number}.")
    yield from _of({"norm": (4096,), "head": (151936, 4096)})


def _experts(_: int) -> Iterator[Description]:
    """18,819 tensors, 31 GB: a mixture of 128 small experts in each of 48 layers."""
    attention: Shapes = {"q": (4096, 2048), "k": (512, 2048), "v": (512, 2048), "o": (2048, 4096)}
    attention |= {"router": (128, 2048), "input_norm": (2048,), "post_norm": (2048,), "q_norm": (128,)}
    expert: Shapes = {"gate": (384, 2048), "up": (384, 2048), "down": (2048, 384)}
    yield from _of({"embed": (151936, 2048)})
    for number in range(48):
        yield from _of(attention, prefix=f"layers.{number}.")
        for each in range(128):
            yield from _of(expert, prefix=f"layers.{number}.experts.{each}.")
    yield from _of({"norm": (2048,), "head": (151936, 2048)})


DESCRIPTIONS = {"awkward": _awkward, "8b": _dense, "moe": _experts}
"""Models by name: the function returns each tensor for about so many bytes, which only "awkward" heeds."""

MIXTURES = {
    "30b-a3b": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "tiny-mixture": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
}
"""Mixtures of experts, whose packed parameters are sent as the tensors of their files.

Each layer of 30b-a3b has 1.25 GB in 393 tensors; embeddings and output layer have 1.24 GB.
"""
