"""The tensors of ``hwrl bench weights``: the shapes of some models, and their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch

from hwrl.comm import raw_bytes
from hwrl.saved_names import SavedNames
from hwrl.weights import WeightLayout

Description = tuple[str, tuple[int, ...], torch.dtype]
Tensors = Mapping[str, torch.Tensor]
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


class BenchPayload:
    """The named tensors of one process on its device; every process starts with the same values.

    ``flat`` is one storage for all tensors, and ``views`` are the tensors in it.
    """

    def __init__(self, model: str, *, nbytes: int, layers: int, device: torch.device) -> None:
        self.device = device
        self._whole, self.named = _tensors(model, nbytes=nbytes, layers=layers, device=device)
        self.layout = WeightLayout.plan(self.named, flat=True)
        self.flat = torch.zeros(self.layout.nbytes, dtype=torch.uint8, device=device)
        self.views = self.layout.views(self.flat)

    @cached_property
    def copies(self) -> Tensors:
        """One contiguous tensor for each tensor, with its own storage. The first use allocates."""
        return {name: torch.zeros_like(tensor, memory_format=torch.contiguous_format) for name, tensor in self.named}

    def change(self) -> None:
        """Give the tensors other values, the same in every process.

        The values of 256 changes in a row differ in every byte: no way finds what an earlier way received.
        """
        for tensor in self._whole:
            raw_bytes(tensor).add_(1)

    def copy_into(self, target: Tensors) -> None:
        """Copy the tensors into those of the same names."""
        for name, tensor in self.named:
            target[name].copy_(tensor)

    def is_equal(self, received: Tensors) -> bool:
        """Return whether the received tensors and this process's tensors have the same bits."""
        return all(
            torch.equal(raw_bytes(received[name].contiguous()), raw_bytes(tensor.contiguous()))
            for name, tensor in self.named
        )


def _tensors(
    model: str, *, nbytes: int, layers: int, device: torch.device
) -> tuple[list[torch.Tensor], list[tuple[str, torch.Tensor]]]:
    """Return contiguous tensors with values, and the tensors to send: some are views of those."""
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    names: SavedNames | None = None
    if model in MIXTURES:
        meta = _mixture(MIXTURES[model], layers)
        names = SavedNames.of(meta)
        described = [(name, tuple(one.shape), one.dtype) for name, one in meta.named_parameters()]
    else:
        described = list(MODELS[model](nbytes))
    named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in described]
    for number, (_, tensor) in enumerate(named):
        for part in raw_bytes(tensor).split(len(noise) - 4096):
            part.copy_(noise[number % 4096 :][: len(part)])
    whole = [tensor for _, tensor in named]
    if names is not None:
        return whole, list(names.all_parts(named))
    changed = {"transposed": lambda tensor: tensor.T, "strided": lambda tensor: tensor[:, ::2]}
    named = [(name, changed[name](tensor) if name in changed else tensor) for name, tensor in named]
    return whole, [*named, ("tied", named[0][1])] if model == "awkward" else named


def _mixture(sizes: Mapping[str, int], layers: int) -> Any:
    """Return a model on the meta device, whose parameters hold all experts of a layer."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = CONFIG_MAPPING["qwen3_moe"](
        **sizes, num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False
    )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, trust_remote_code=False)


def _of(shapes: Shapes, dtype: torch.dtype = torch.bfloat16, *, prefix: str = "") -> Iterator[Description]:
    yield from ((prefix + name, shape, dtype) for name, shape in shapes.items())


def _awkward(nbytes: int) -> Iterator[Description]:
    """Mostly bfloat16 matrices, as in a language model, and one tensor of each kind that transfers get wrong."""
    yield from _of({"embed": (max(1, nbytes // 5 // (2 * _HIDDEN)), _HIDDEN), "odd": (1001,), "empty": (0, 4)})
    yield from _of({"scale": (), "strided": (77, 9)}, torch.float32)
    yield from _of({"transposed": (_HIDDEN, 333)})
    yield "step", (3,), torch.int64
    yield "bytes", (13,), torch.uint8
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


MODELS = {"awkward": _awkward, "8b": _dense, "moe": _experts}

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
