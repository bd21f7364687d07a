"""The bytes that the FSDP2 engine's model and optimizer need on one rank, by cause: :class:`StateMemory`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hwrl.interfaces import EngineSettings

_GRADIENT = 4
_MOMENTS = 8
"""Bytes for each trained number: a float32 gradient, and AdamW's two moments."""


@dataclass(frozen=True)
class StateMemory:
    """Bytes of the fullest rank in a step.

    ``parameters``, ``gradients`` and ``moments`` are the rank's own; they are in host memory if ``on_host``, else on
    the device. The rest is always on the device. ``compute_copy`` is the copy in the dtype of the computation, without
    sharding. ``gathered`` is the peak of gathered weights, and ``reducing`` the peak of gradients before reduction, if
    the ranks gather layer by layer. ``whole_weights`` and ``whole_gradients`` are the same for the whole model at once.
    """

    parameters: int
    gradients: int
    moments: int
    compute_copy: int
    gathered: int
    reducing: int
    whole_weights: int
    whole_gradients: int
    on_host: bool

    @classmethod
    def of(
        cls, model: torch.nn.Module, layers: Sequence[torch.nn.Module], settings: EngineSettings, *, ranks: int
    ) -> StateMemory:
        """Return the memory of ``model``, which may be on the meta device, on one of ``ranks``.

        ``model`` is whole. Its parameters have the dtypes in which they are stored; an adapter's base is frozen.
        ``layers`` are gathered one by one (:func:`~hwrl.train.sharding.layers_of`). The ``dtype``, ``shard_ranks`` and
        ``host_step`` of ``settings`` count.
        """
        everything = list(model.parameters())
        trained = [one for one in everything if one.requires_grad]
        dtype, sharded = settings.dtype, ranks > 1 or settings.host_step
        shards = (settings.shard_ranks or ranks) if sharded else 1
        own_trained = sum(_shard_numel(one, shards) for one in trained)
        gathered, reducing = _of_layers(everything, layers, dtype) if sharded else (0, 0)
        return cls(
            parameters=sum(_shard_numel(one, shards) * one.dtype.itemsize for one in everything),
            gradients=own_trained * _GRADIENT,
            moments=own_trained * _MOMENTS,
            compute_copy=0 if sharded else sum(one.numel() for one in trained if one.dtype != dtype) * dtype.itemsize,
            gathered=gathered,
            reducing=reducing,
            whole_weights=_numel(everything) * dtype.itemsize,
            whole_gradients=_numel(trained) * _GRADIENT,
            on_host=settings.host_step,
        )


def _of_layers(
    everything: Sequence[torch.nn.Parameter], layers: Sequence[torch.nn.Module], dtype: torch.dtype
) -> tuple[int, int]:
    """Return the peaks of gathered weights and of whole gradients, if ranks gather layer by layer.

    Parameters outside the layers stay gathered during a pass. Beside them are the layer that runs and the next one,
    gathered ahead. A layer's gradients exist in ``dtype``, and again in float32 on their way to the shards.
    """
    in_layers = [list(layer.parameters()) for layer in layers]
    inside = {id(one) for parameters in in_layers for one in parameters}
    rest = [one for one in everything if id(one) not in inside]
    sizes = [_numel(parameters) * dtype.itemsize for parameters in in_layers]
    groups = [[one for one in parameters if one.requires_grad] for parameters in [*in_layers, rest]]
    gradients = max(_numel(group) for group in groups) * (dtype.itemsize + _GRADIENT)
    return _numel(rest) * dtype.itemsize + 2 * max(sizes, default=0), gradients


def _numel(parameters: Sequence[Any]) -> int:
    return sum(one.numel() for one in parameters)


def _shard_numel(parameter: torch.nn.Parameter, shards: int) -> int:
    """Return the number of elements in the largest shard: the first dimension is divided, rounded up."""
    if not parameter.dim():
        return 1
    return -(-parameter.shape[0] // shards) * math.prod(parameter.shape[1:])
