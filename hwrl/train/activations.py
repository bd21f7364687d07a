"""Recompute layers in the backward pass, as many as the device's memory needs: :class:`ActivationCheckpointing`."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from hwrl.interfaces import Backend, Capability, MemoryInfo

_log = logging.getLogger("hwrl.train")

_RESERVE = 16
"""One part in so many of the device's memory stays free: for scores, for fragments and for the libraries."""


def layers_to_recompute(
    layers: int, tokens: int, *, kept_nbytes: float, input_nbytes: float, room_nbytes: float
) -> int:
    """Return how many of ``layers`` must be recomputed, so that a pass over ``tokens`` tokens fits ``room_nbytes``.

    A layer keeps ``kept_nbytes`` for each token, and ``input_nbytes`` if it is recomputed. The backward pass of one
    layer needs as much again as it keeps, twice.

    >>> layers_to_recompute(10, 100, kept_nbytes=50, input_nbytes=5, room_nbytes=60_000)
    0
    >>> layers_to_recompute(10, 100, kept_nbytes=50, input_nbytes=5, room_nbytes=50_000)
    3
    """
    saved = tokens * (kept_nbytes - input_nbytes)
    missing = tokens * kept_nbytes * (layers + 2) - room_nbytes
    if missing <= 0 or saved <= 0:
        return 0
    return min(layers, math.ceil(missing / saved))


def usable_nbytes(info: MemoryInfo) -> int:
    """Return the bytes that this process can still allocate: free ones, and those in the allocator's cache."""
    return info.free_nbytes + info.reserved_nbytes - info.allocated_nbytes - info.total_nbytes // _RESERVE


class ActivationCheckpointing:
    """Lets ``layers`` keep only their inputs for the backward pass, and run again in it: all, none, or some.

    ``setting`` True means all layers, in every pass, and False none. ``auto`` measures: the first pass keeps only the
    activations of the last layer, and measures them on the device. Each later pass recomputes its first layers, as few
    as fit the free memory. ``owed_nbytes`` returns the bytes that the step will still allocate for other things.
    A backend without memory statistics recomputes nothing with ``auto``.

    After Chen et al. 2016, https://arxiv.org/abs/1604.06174. The layers must not draw random numbers. Their first
    tensor is the hidden states; its last dimension is their width.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        *,
        setting: Literal["auto"] | bool,
        backend: Backend,
        owed_nbytes: Callable[[], int],
    ) -> None:
        self._backend, self._owed_nbytes, self._layers = backend, owed_nbytes, len(layers)
        self._setting = setting
        if setting == "auto" and not backend.supports(Capability.MEMORY_STATS).usable:
            self._setting = False
        self.recomputed = len(layers) if self._setting is True else 0
        """The number of layers that the newest pass recomputes: the first ones."""
        self._kept_nbytes: float | None = None
        self._measured_tokens = 0
        self._last = len(layers)
        self._told = False
        if self._setting is not False:
            for index, layer in enumerate(layers):
                layer.forward = functools.partial(self._run, index, layer.forward)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        if self._setting == "auto" and index <= self._last:  # the first layer of a pass
            self._choose(hidden)
        self._last = index
        if index < self.recomputed:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        tokens = hidden.numel() // hidden.shape[-1]
        if self._setting is True or tokens <= self._measured_tokens:
            return forward(*args, **kwargs)
        before = self._backend.memory_info().allocated_nbytes
        result = forward(*args, **kwargs)
        self._kept_nbytes = max(0, self._backend.memory_info().allocated_nbytes - before) / tokens
        self._measured_tokens = tokens
        return result

    def _choose(self, hidden: torch.Tensor) -> None:
        """Set :attr:`recomputed` for the pass that begins with ``hidden``."""
        if self._kept_nbytes is None:
            self.recomputed = self._layers - 1
            return
        tokens = hidden.numel() // hidden.shape[-1]
        room = usable_nbytes(self._backend.memory_info()) - self._owed_nbytes()
        self.recomputed = layers_to_recompute(
            self._layers,
            tokens,
            kept_nbytes=self._kept_nbytes,
            input_nbytes=hidden.nbytes / tokens,
            room_nbytes=room,
        )
        if not self._told:
            self._told = True
            _log.info(
                "activation checkpointing: %d of %d layers are recomputed in a pass over %d tokens; a layer keeps %d "
                "bytes a token, and there is room for %.2f GiB",
                *(self.recomputed, self._layers, tokens, self._kept_nbytes, room / (1 << 30)),
            )
