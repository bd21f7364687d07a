"""The tensors of ``hwrl bench weights``: the shapes of three models, and their values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cached_property

import torch

from hwrl.comm import raw_bytes
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

    def __init__(self, model: str, *, nbytes: int, device: torch.device) -> None:
        self.device = device
        self.named = _tensors(model, nbytes=nbytes, device=device)
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
        for name, tensor in self.named:
            if name != "tied":
                raw_bytes(tensor if tensor._base is None else tensor._base).add_(1)

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


def _tensors(model: str, *, nbytes: int, device: torch.device) -> list[tuple[str, torch.Tensor]]:
    noise = torch.randint(0, 256, (1 << 24,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
    described = list(MODELS[model](nbytes))
    named = [(name, torch.empty(shape, dtype=dtype, device=device)) for name, shape, dtype in described]
    for number, (_, tensor) in enumerate(named):
        for part in raw_bytes(tensor).split(len(noise) - 4096):
            part.copy_(noise[number % 4096 :][: len(part)])
    changed = {"transposed": lambda tensor: tensor.T, "strided": lambda tensor: tensor[:, ::2]}
    named = [(name, changed[name](tensor) if name in changed else tensor) for name, tensor in named]
    return [*named, ("tied", named[0][1])] if model == "awkward" else named


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
