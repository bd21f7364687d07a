"""A key-value cache for continuous batching: one slot for each running request, each slot at its own position."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

COPY_NBYTES = 64 << 20
"""A copy of slots is made in parts of at most this size, or of one position of each slot."""


class SlotCache(Cache):  # type: ignore[misc] # transformers is not followed by the type checker
    """A :class:`transformers.Cache` in which each running request has a slot (a row) of fixed length.

    The used slots are 0 … n-1, without gaps, so a step reads them as one slice, without a copy. When a request ends,
    the caller moves the last request into its slot (:meth:`move`); it may also order the requests by length. Before
    each forward pass the caller sets the slots and positions of the pass (:meth:`place`). The caller also makes the
    attention masks.
    """

    def __init__(self, *, slots: int, length: int, device: torch.device) -> None:
        self.slots, self.length, self.device = slots, length, device
        self.rows = slice(0, 0)
        self.positions = torch.empty(0, 0, dtype=torch.long, device=device)
        self.used_length = 0
        super().__init__(layer_class_to_replicate=lambda **_: _SlotLayer(self))

    def place(self, rows: slice, positions: torch.Tensor, used_length: int) -> None:
        """Set where the next forward pass writes: ``positions`` (rows × new tokens, int64) in the slots ``rows``.

        Its attention reads the first ``used_length`` positions of these slots. ``used_length`` is at most ``length``.
        """
        self.rows, self.positions, self.used_length = rows, positions, used_length

    def move(self, sources: torch.Tensor, targets: torch.Tensor, used_length: int) -> None:
        """Copy the first ``used_length`` positions of the slots ``sources`` over the slots ``targets``, all at once.

        Both are int64. Needs memory for a part of :data:`COPY_NBYTES`.
        """
        for content, part in self._parts(len(sources), used_length):
            content[targets, :, part] = content[sources, :, part]

    def spread(self, rows: slice, sources: torch.Tensor, used_length: int) -> None:
        """Copy slots within ``rows``: slot ``rows.start + i`` gets the content of ``rows.start + sources[i]``.

        ``sources`` (int64) has one element for each of the ``rows``. Only the first ``used_length`` positions are
        copied. Needs memory for a part of :data:`COPY_NBYTES`.
        """
        for content, part in self._parts(len(sources), used_length):
            own = content[rows, :, part]
            own.copy_(own[sources])

    def _parts(self, rows: int, used_length: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """Yield the keys and the values of each layer with ranges of the first ``used_length`` positions.

        ``rows`` slots of such a range have at most :data:`COPY_NBYTES`, or one position.
        """
        for layer in self.layers:
            for content in (layer.keys, layer.values):
                step = max(1, COPY_NBYTES // max(1, rows * content[0, :, 0].nbytes))
                for start in range(0, used_length, step):
                    yield content, slice(start, min(start + step, used_length))

    def position_nbytes(self) -> int:
        """Return the bytes of one position of a slot in a layer; 0 before the first forward pass."""
        if not self.layers:
            return 0
        layer = self.layers[0]
        return int(layer.keys[0, :, 0].nbytes + layer.values[0, :, 0].nbytes)

    def drop(self) -> int:
        """Free the memory of all slots, and lose their content; return its bytes.

        The next forward pass allocates it again.
        """
        nbytes: int = sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)
        self.layers.clear()
        return nbytes


class _SlotLayer(CacheLayerMixin):  # type: ignore[misc] # transformers is not followed by the type checker
    is_sliding = False

    def __init__(self, cache: SlotCache) -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        heads = key_states.shape[1]
        shape = (self._cache.slots, heads, self._cache.length)
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self._cache
        keys, values = self.keys[cache.rows], self.values[cache.rows]
        row = torch.arange(len(key_states), device=cache.device)[:, None]
        keys[row, :, cache.positions] = key_states.transpose(1, 2)
        values[row, :, cache.positions] = value_states.transpose(1, 2)
        return keys[:, :, : cache.used_length], values[:, :, : cache.used_length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.used_length, 0

    def get_seq_length(self) -> int:
        return self._cache.used_length

    def get_max_length(self) -> int:
        return self._cache.length


def cache_token_nbytes(config: Any, *, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers; ``config`` is the model's in transformers."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * size * itemsize)
