"""A key-value cache with one slot a running request, each at a position of its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotCache(Cache):  # type: ignore[misc] # transformers is not followed by the type checker
    """A :class:`transformers.Cache` for continuous batching.

    Slots 0 … n-1 are in use; a request that ends is replaced by the last one (:meth:`move`), so that a step works on
    a prefix of the slots and copies nothing. Before each forward pass the caller says which slots it covers and
    where the new tokens go (:meth:`place`); attention masks are the caller's as well.
    """

    def __init__(self, *, slots: int, length: int, device: torch.device) -> None:
        self.slots, self.length, self.device = slots, length, device
        self.rows = slice(0, 0)
        self.positions = torch.empty(0, 0, dtype=torch.long, device=device)
        self.used_length = 0
        super().__init__(layer_class_to_replicate=lambda **_: _SlotLayer(self))

    def place(self, rows: slice, positions: torch.Tensor, used_length: int) -> None:
        """Say where the next forward pass writes: ``positions`` (rows × new tokens, int64) of the slots ``rows``.

        ``used_length`` is how much of the slots attention looks at, at most ``length``.
        """
        self.rows, self.positions, self.used_length = rows, positions, used_length

    def move(self, sources: list[int], targets: list[int], used_length: int) -> None:
        """Copy the first ``used_length`` positions of the slots ``sources`` over the slots ``targets``."""
        for layer in self.layers:
            layer.keys[targets, :, :used_length] = layer.keys[sources, :, :used_length]
            layer.values[targets, :, :used_length] = layer.values[sources, :, :used_length]

    def drop(self) -> int:
        """Free the memory of all slots, whose content is lost, until the next forward pass; return its bytes."""
        nbytes: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
        self.layers.clear()
        return nbytes


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is not followed by the type checker
    is_sliding = False

    def __init__(self, owner: SlotCache) -> None:
        super().__init__()
        self._owner = owner

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        heads = key_states.shape[1]
        shape = (self._owner.slots, heads, self._owner.length)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        owner = self._owner
        keys, values = self.keys[owner.rows], self.values[owner.rows]
        row = torch.arange(len(key_states), device=owner.device)[:, None]
        keys[row, :, owner.positions] = key_states.transpose(1, 2)
        values[row, :, owner.positions] = value_states.transpose(1, 2)
        return keys[:, :, : owner.used_length], values[:, :, : owner.used_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.used_length, 0

    def get_seq_length(self) -> int:
        return self._owner.used_length

    def get_max_length(self) -> int:
        return self._owner.length
