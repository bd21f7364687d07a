"""Recompute layers in the backward pass, as many as the device's memory needs: :class:`ActivationCheckpointing`."""

from __future__ import annotations

import functools
import logging
import math
import socket
import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.checkpoint import checkpoint

from hwrl.interfaces import Backend, Capability, MemoryInfo

if TYPE_CHECKING:
    from hwrl.comm import Group

_log = logging.getLogger("hwrl.train")

_RESERVE = 16
"""1 / ``_RESERVE`` of the device's memory stays free: for fragments, for the libraries, and for scores."""


def layers_to_recompute(
    layers: int, tokens: int, *, kept_nbytes: float, input_nbytes: float, room_nbytes: float
) -> int:
    """Return how many of ``layers`` must be recomputed, so that a pass over ``tokens`` tokens fits ``room_nbytes``.

    A layer keeps ``kept_nbytes`` for each token, and ``input_nbytes`` if it is recomputed. The backward pass of the
    layer that runs needs twice as much again.

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


def usable_nbytes(info: MemoryInfo, *, ranks: int = 1, scores_nbytes: int = 0) -> int:
    """Return the bytes that this process can still allocate: free ones, and those in the allocator's cache.

    ``ranks`` processes share the device equally. One part in 16 of this process's share stays free, or
    ``scores_nbytes`` if they are more.

    >>> usable_nbytes(MemoryInfo(500, 1600, allocated_nbytes=900, reserved_nbytes=1000, peak_nbytes=1100))
    500
    """
    cached = info.reserved_nbytes - info.allocated_nbytes
    reserve = reserve_nbytes(info.total_nbytes, ranks=ranks, scores_nbytes=scores_nbytes)
    return info.free_nbytes // ranks + cached - reserve


def reserve_nbytes(total_nbytes: int, *, ranks: int = 1, scores_nbytes: int = 0) -> int:
    """Return the bytes that stay free on a device of ``total_nbytes``; see :func:`usable_nbytes`."""
    return max(total_nbytes // (_RESERVE * ranks), scores_nbytes)


def ranks_on_device(group: Group | None, backend: Backend) -> int:
    """Return how many ranks of ``group`` use this rank's device: 1 unless the backend has ``shared_device_groups``.

    Collective: all ranks call it.
    """
    if group is None or not backend.supports(Capability.SHARED_DEVICE_GROUPS).usable:
        return 1
    index = backend.current_index()
    number = zlib.crc32((backend.device_uuid(index) or f"{socket.gethostname()} {index}").encode())
    mine = torch.tensor([number], dtype=torch.int64, device=backend.device())
    numbers = mine.new_zeros(group.size)
    group.all_gather(numbers, mine)
    return int((numbers == mine).sum())


class ActivationCheckpointing:
    """Lets ``layers`` keep only their inputs for the backward pass, and run again in it: all, none, or some.

    ``setting`` True means all layers, in every pass, and False none. ``auto`` measures: the first pass recomputes all
    layers but the last, and measures the bytes that the last one keeps. Each later pass recomputes its first layers, as
    few as it can so that the activations fit ``room_nbytes()``. On a backend without memory statistics, ``auto``
    recomputes nothing.

    A layer with collectives in its forward pass runs them again when it is recomputed. So all ranks in these
    collectives must recompute the same layers: ``agree`` takes a rank's number of layers, and returns the largest.
    ``auto`` calls it once at the start of each pass with gradients, so these ranks must run the same number of passes.

    After Chen et al. 2016, https://arxiv.org/abs/1604.06174. The layers must not draw random numbers. Their first
    tensor is the hidden states; its last dimension is their width.
    """

    def __init__(
        self,
        layers: Sequence[torch.nn.Module],
        *,
        setting: Literal["auto"] | bool,
        backend: Backend,
        room_nbytes: Callable[[], int],
        agree: Callable[[int], int] | None = None,
    ) -> None:
        self._backend, self._room_nbytes, self._agree, self._layers = backend, room_nbytes, agree, len(layers)
        self._setting = setting
        if setting == "auto" and not backend.supports(Capability.MEMORY_STATS).usable:
            self._setting = False
        self.recomputed = len(layers) if self._setting is True else 0
        """The number of layers that the newest pass recomputes: the first ones."""
        self._kept_nbytes: float | None = None
        self._measured_tokens = 0
        self._last = len(layers)
        self._logged = False
        if self._setting is not False:
            for index, layer in enumerate(layers):
                layer.forward = functools.partial(self._run, index, layer.forward)

    def _run(self, index: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor))
        if self._setting == "auto" and index <= self._last:  # the first layer of a pass
            wanted = self._wanted(hidden)
            self.recomputed = wanted if self._agree is None else self._agree(wanted)
        self._last = index
        if index < self.recomputed:
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
        tokens = hidden.numel() // hidden.shape[-1]
        if self._setting is True or tokens <= self._measured_tokens:
            return forward(*args, **kwargs)
        before = self._backend.memory_info().allocated_nbytes
        result = forward(*args, **kwargs)
        kept_nbytes = self._backend.memory_info().allocated_nbytes - before
        if kept_nbytes >= hidden.nbytes:  # else something was freed meanwhile: its output alone needs as much
            self._kept_nbytes = max(self._kept_nbytes or 0.0, kept_nbytes / tokens)
            self._measured_tokens = tokens
        return result

    def _wanted(self, hidden: torch.Tensor) -> int:
        """Return how many layers this rank must recompute in the pass that begins with ``hidden``."""
        tokens = hidden.numel() // hidden.shape[-1]
        if tokens == 0:
            return 0
        if self._kept_nbytes is None:
            return self._layers - 1
        room = self._room_nbytes()
        wanted = layers_to_recompute(
            self._layers,
            tokens,
            kept_nbytes=self._kept_nbytes,
            input_nbytes=hidden.nbytes / tokens,
            room_nbytes=room,
        )
        if not self._logged:
            self._logged = True
            _log.info(
                "activation checkpointing: %d of %d layers must be recomputed in a pass over %d tokens; a layer keeps "
                "%d bytes a token, and there is room for %.2f GiB",
                *(wanted, self._layers, tokens, self._kept_nbytes, room / (1 << 30)),
            )
        return wanted
