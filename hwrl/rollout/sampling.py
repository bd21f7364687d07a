"""Sample the next token of each slot, with the settings of its request."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hwrl.interfaces import Sampling


class SlotSampler:
    """Samples the next token of each slot. The slots' settings lie on the device.

    Only rows with a filter cost a sort of the vocabulary. A row's token does not depend on other rows.
    """

    def __init__(self, *, slots: int, device: torch.device) -> None:
        self._device = device
        self._is_filtered = [False] * slots
        self._temperature = torch.zeros(slots, device=device)
        self._top_p = torch.ones(slots, device=device)
        self._top_k = torch.zeros(slots, dtype=torch.long, device=device)
        self._min_p = torch.zeros(slots, device=device)

    def fill(self, rows: slice, settings: Sequence[Sampling]) -> None:
        """Set the settings of the slots ``rows``, for new requests."""
        self._is_filtered[rows] = [one.is_filtered for one in settings]
        self._temperature[rows] = torch.tensor([one.temperature for one in settings], device=self._device)
        if any(self._is_filtered[rows]):
            self._top_p[rows] = torch.tensor([one.top_p for one in settings], device=self._device)
            self._top_k[rows] = torch.tensor([_kept(one) for one in settings], device=self._device)
            self._min_p[rows] = torch.tensor([one.min_p for one in settings], device=self._device)

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copy the settings of the slots ``sources`` over those of the slots ``targets``, all at once."""
        filtered = [self._is_filtered[source] for source in sources]
        for target, is_filtered in zip(targets, filtered, strict=True):
            self._is_filtered[target] = is_filtered
        from_rows, to_rows = torch.tensor([sources, targets], device=self._device)
        for state in (self._temperature, self._top_p, self._top_k, self._min_p):
            state[to_rows] = state[from_rows]

    def sample(self, rows: slice, logits: torch.Tensor, draws: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token (int64) and its log-probability (float32) for each slot of ``rows``, each rows × 1.

        ``logits`` are rows × vocabulary, and ``draws`` rows × 1: a random number from [0, 1) for each token.
        """
        temperature = self._temperature[rows]
        greedy = temperature == 0
        scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
        filtered = any(self._is_filtered[rows])
        if filtered:
            self._filter(scaled, rows)
        logprobs = scaled.log_softmax(-1)
        sums = logprobs.exp().cumsum(-1)
        # The first token with a sum above the draw. Its probability is not 0, because a float32 draw is below 1.
        drawn = (sums <= draws * sums[:, -1:]).sum(-1)
        best = logprobs.argmax(-1)
        token = torch.where(greedy, best, drawn)[:, None]
        chosen = logprobs.gather(1, token)
        if filtered:  # a device may round a sum over dropped tokens differently, and so draw one of them
            token = torch.where(chosen == -torch.inf, best[:, None], token)
            chosen = logprobs.gather(1, token)
        return token, chosen

    def _filter(self, scaled: torch.Tensor, rows: slice) -> None:
        """Drop tokens in the rows of ``scaled`` that have a filter, in place."""
        filtered = [place for place, is_filtered in enumerate(self._is_filtered[rows]) if is_filtered]
        places = torch.tensor(filtered, device=self._device)
        slots = places + rows.start
        scaled[places] = filter_logits(
            scaled[places], top_p=self._top_p[slots], top_k=self._top_k[slots], min_p=self._min_p[slots]
        )


def filter_logits(
    logits: torch.Tensor, *, top_p: torch.Tensor, top_k: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Return ``logits`` (rows × vocabulary) with -inf for the tokens that the filters drop.

    ``top_p``, ``top_k`` (int64, at least 1) and ``min_p`` have one value for each row. Min-p comes first, then top-k,
    then top-p. Each filter keeps all tokens from a certain logit up. So tokens with equal logits stay together, and
    top-k and top-p may keep more tokens than they ask for.
    """
    ranked = logits.sort(-1, descending=True).values
    smallest = torch.maximum(
        ranked[:, :1] + min_p[:, None].log(), ranked.gather(1, top_k[:, None].clamp(max=logits.shape[1]) - 1)
    )
    shares = ranked.masked_fill(ranked < smallest, -torch.inf).softmax(-1)
    before = shares.cumsum(-1) - shares
    needed = (before < top_p[:, None]).sum(-1, keepdim=True).clamp(min=1)
    last = torch.maximum(smallest, ranked.gather(1, needed - 1))
    smallest = torch.where(top_p[:, None] < 1, last, smallest)
    return logits.masked_fill(logits < smallest, -torch.inf)


def _kept(sampling: Sampling) -> int:
    """Return the number of tokens that top-k keeps. For -1 it is larger than any vocabulary."""
    return sampling.top_k if sampling.top_k > 0 else 1 << 62
