"""Calls of a model over the slots of a cache, each row at its own position: :class:`SlotCalls`."""

from __future__ import annotations

from typing import Any

import torch

from hwrl.errors import EngineError
from hwrl.models import EAGER, cache_argument, logits_at, rope_changes, uses_attention_interface
from hwrl.rollout.slots import SlotCache

_FULL, _SLIDING = "full_attention", "sliding_attention"
_SDPA = "sdpa"
_TRIAL = (7, 4, 300)
"""The lengths of the trial's prompts; the last one is longer than the local windows of old architectures."""


class SlotCalls:
    """How to call ``model`` on rows of up to ``max_length`` tokens: with the masks that its layers read.

    Raises EngineError for a model with layers of a kind without masks here, and for one whose rotary frequencies would
    depend on the longest running row. :attr:`divisible` tells whether the attention of a call can be replaced.
    """

    def __init__(self, model: Any, *, max_length: int) -> None:
        config, self._model = model.config, model
        self._cache_argument = cache_argument(model)
        attention = getattr(config, "_attn_implementation", None)
        if attention not in (None, _SDPA, EAGER):
            raise _unsuited(model, f"its attention is {attention}, and the engine makes masks for {_SDPA} and {EAGER}")
        self._adds_masks = attention == EAGER
        self.divisible = uses_attention_interface(model) and not self._adds_masks
        self._window = getattr(config, "sliding_window", None)
        self._kinds = sorted(set(getattr(config, "layer_types", None) or [_SLIDING if self._window else _FULL]))
        others = [kind for kind in self._kinds if kind not in (_FULL, _SLIDING)]
        if others:
            raise _unsuited(
                model, f"it serves full and sliding attention, and the model has layers of the kinds {others}"
            )
        if self._window is None or self._window >= max_length or _SLIDING not in self._kinds:
            self._kinds, self._window = self._kinds[:1], None
        if rope_changes(config, max_length=max_length):
            raise _unsuited(
                model,
                f"its rotary frequencies would depend on the longest of the running rows, of up to {max_length} tokens",
                fix="make the model with hwrl.models.build_model(..., max_length=...), which fixes them",
            )

    def __call__(
        self, cache: SlotCache, tokens: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        """Run the model; return the logits (rows × vocabulary) of each row at its position ``last``.

        ``mask`` tells for each new token (``positions``) which positions it sees, but for a sliding window.
        """
        masks = dict.fromkeys(self._kinds, mask)
        if self._window is not None:
            places = torch.arange(mask.shape[-1], device=mask.device)
            masks[_SLIDING] = mask & (places > positions[: len(mask), None, :, None] - self._window)
        if self._adds_masks:
            dtype = self._model.dtype
            hidden = torch.finfo(dtype).min
            masks = {kind: torch.where(one, 0.0, hidden).to(dtype) for kind, one in masks.items()}
        return logits_at(
            self._model,
            torch.arange(len(tokens), device=mask.device) * tokens.shape[1] + last,
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks if len(masks) > 1 else masks[self._kinds[0]],
            use_cache=True,
            **{self._cache_argument: cache},
        )

    def prove(self, *, max_length: int) -> None:
        """Raise EngineError if a call on several prompts, or on the next token of each, differs from plain calls."""
        lengths = [max(1, min(length, max_length - 1)) for length in _TRIAL]
        used, device = max(lengths) + 1, next(self._model.parameters()).device
        places, last = torch.arange(used, device=device), torch.tensor(lengths, device=device)
        factors = places + 2 + 31 * torch.arange(len(lengths), device=device)[:, None]
        tokens = (places + 1) * factors % self._model.config.get_text_config().vocab_size
        cache = SlotCache(slots=len(lengths), length=used, device=device)
        rows, positions = slice(0, len(lengths)), places.expand(len(lengths), used)
        try:
            plain = [
                self._model(row[None, : length + 1], use_cache=False).logits
                for row, length in zip(tokens, lengths, strict=True)
            ]
            cache.place(rows, positions[:, :-1], used - 1)
            causal = (places[:-1] <= places[:-1, None])[None, None]
            first = self(cache, tokens[:, :-1], positions[:, :-1], causal, last - 1)
            cache.place(rows, last[:, None], used)
            seen = (places <= last[:, None])[:, None, None]
            second = self(cache, tokens.gather(1, last[:, None]), last[:, None], seen, torch.zeros_like(last))
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # a model of another kind may raise anything
            raise _unsuited(self._model, f"it refuses the engine's masks or cache: {exc!r}") from exc
        found = torch.stack([first, second], 1).float().log_softmax(-1)
        wanted = torch.stack([logits[0, -2:] for logits in plain]).float().log_softmax(-1)
        off = float((found.exp() * (found - wanted)).sum(-1).abs().max())
        if not off <= (1e-3 if self._model.dtype == torch.float32 else 0.1):
            raise _unsuited(
                self._model,
                f"its next token beside other rows has another distribution than alone, by {off:.3g} nats: it reads "
                "the engine's masks or positions in another way",
            )


def _unsuited(
    model: Any, why: str, *, fix: str = "take another architecture, or another rollout.engine"
) -> EngineError:
    return EngineError(f"the embedded engine cannot generate with {type(model).__name__}", why=why, fix=fix)
