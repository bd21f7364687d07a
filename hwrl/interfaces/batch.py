"""Training batches: padded rows, and their division into micro-batches of similar length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Batch:
    """Rows of tokens, padded on the right: a prompt and all tokens after it, by the policy and by others.

    ``tokens`` (rows × length, int64), ``mask`` (rows × length, bool: true on the policy's tokens),
    ``behaviour_logprobs`` (rows × length, float32, the engine's, aligned with ``tokens``), ``advantages`` (rows, or
    rows × length, float32). The others may be None: ``proximal_logprobs`` (rows × length: the policy's at the start of
    the step), ``reference_logprobs`` (rows × length: a frozen policy's), ``weights`` (rows, float32: a factor on the
    loss of each token of the row; None: 1). A critic adds ``values`` (its estimate before each token) and ``returns``
    (both rows × length).
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    behaviour_logprobs: torch.Tensor
    advantages: torch.Tensor
    proximal_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    values: torch.Tensor | None = None
    returns: torch.Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.tokens)

    @property
    def trained_tokens(self) -> int:
        """Number of the policy's tokens."""
        return int(self.mask.sum())

    def select(self, rows: torch.Tensor) -> Batch:
        """Return the rows with the indices ``rows`` (int64), cut to the longest of them, but at least one column."""
        length = max(1, int(self.lengths()[rows].max())) if len(rows) else 1
        chosen = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                value = value[rows] if value.ndim == 1 else value[rows, :length]
            chosen[field.name] = value
        return Batch(**chosen)

    def lengths(self) -> torch.Tensor:
        """Return the length of each row up to the policy's last token; no token after it is trained."""
        import torch

        places = torch.arange(1, self.mask.shape[1] + 1)
        return (self.mask * places).amax(1)

    def micro_batches(self, *, max_tokens: int) -> Iterator[torch.Tensor]:
        """Yield row indices, so that each part holds at most ``max_tokens`` padded tokens, or a single row.

        Rows are sorted by length, and no row is less than half as long as its part: at most half of it is padding.
        Rows without a token of the policy are left out.
        """
        lengths, order = self.lengths().sort(descending=True, stable=True)
        order = order[lengths > 0]
        start = 0
        while start < len(order):
            longest = int(lengths[start])
            similar = int((lengths[start:] * 2 >= longest).sum())
            rows = max(1, min(similar, max_tokens // longest))
            yield order[start : start + rows]
            start += rows
