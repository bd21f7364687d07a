"""The interface of policy losses and advantages: :class:`LossInputs`, :class:`TokenLoss`, :class:`Advantage`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from hwrl.interfaces.groups import PromptGroup

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """The policy's tokens of some rows, one element of each tensor for each token; float32, on one device.

    ``logprobs`` carries the gradient. ``behaviour`` has the log-probabilities of the rollout engine, ``proximal`` of
    the policy at the start of the step, ``reference`` of a frozen policy; the last two are None if the loss does not
    need them. ``entropy`` is the entropy of the policy's distribution at each token; it carries a gradient only if the
    loss needs it. All others, ``advantages`` too, are constant. ``rows`` (int64) has each token's row, 0 …
    ``row_count`` - 1; a row is a trajectory. Rows are whole, unless the loss is token-local. There may be no tokens and
    no rows: a rank with fewer micro-batches than the others runs empty ones.
    """

    logprobs: torch.Tensor
    behaviour: torch.Tensor
    advantages: torch.Tensor
    rows: torch.Tensor
    row_count: int
    entropy: torch.Tensor
    proximal: torch.Tensor | None = None
    reference: torch.Tensor | None = None

    def row_sums(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of ``values`` (tokens) over each row (row_count). Differentiable."""
        return values.new_zeros(self.row_count).index_add(0, self.rows, values)

    def row_means(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of ``values`` (tokens) over each row's tokens (row_count). Differentiable."""
        return self.row_sums(values) / self.row_sums(values.detach().new_ones(len(values))).clamp(min=1)


class TokenLoss(Protocol):
    """A policy loss, token by token. A plain function serves as one: a run adds the defaults given here."""

    @property
    def token_local(self) -> bool:
        """Whether a token's loss depends on this token's inputs alone. Then a step is faster. Default: false."""

    @property
    def needs_proximal(self) -> bool:
        """Whether it needs ``proximal``: a further forward pass at the start of each step. Default: false."""

    @property
    def needs_reference(self) -> bool:
        """Whether it needs ``reference``, the log-probabilities of a frozen policy. Default: false."""

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether ``entropy`` must carry a gradient. Default: false."""

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of each token, and metrics of each token, detached (tokens, each)."""


class Advantage(Protocol):
    """Advantages of a batch of groups, from their rewards."""

    def __call__(self, groups: Sequence[PromptGroup], /) -> npt.NDArray[np.floating]:
        """Return one number for each row of all groups, in order, or one for each of their ``token_ids``.

        Every rank of the trainer calls it with the same groups, and must get the same result.
        """
