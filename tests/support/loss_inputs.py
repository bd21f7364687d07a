"""Inputs of a loss for rows of tokens, and their padded form for formulas."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from hwrl.interfaces import LossInputs, TokenLoss

Doubles = npt.NDArray[np.float64]
LENGTHS = (3, 1, 5, 2)
_NAMES = ("logprobs", "behaviour", "proximal", "reference", "advantages", "entropy")


@dataclass
class Rows:
    """The columns of some rows, end to end (float64), with the length of each row."""

    columns: dict[str, Doubles]
    lengths: Sequence[int]

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The row of each token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    def of_rows(self, values: Doubles) -> list[Doubles]:
        """Return ``values`` row by row."""
        return np.split(values, np.cumsum(self.lengths)[:-1])

    def padded(self, name: str) -> torch.Tensor:
        """Return a column as rows × length (float64), with zeros behind each row."""
        found = torch.zeros(len(self.lengths), max(self.lengths), dtype=torch.float64)
        for row, values in zip(found, self.of_rows(self.columns[name]), strict=True):
            row[: len(values)] = torch.from_numpy(values)
        return found

    @property
    def mask(self) -> torch.Tensor:
        """The tokens of the padded form (rows × length, float64)."""
        return (torch.arange(max(self.lengths)) < torch.tensor(self.lengths)[:, None]).double()

    def inputs(self, logprobs: torch.Tensor | None = None) -> LossInputs:
        """Return the inputs in float64; ``logprobs`` replaces that column."""
        tensors: dict[str, Any] = {name: torch.from_numpy(self.columns[name].copy()) for name in _NAMES}
        if logprobs is not None:
            tensors["logprobs"] = logprobs
        return LossInputs(**tensors, rows=torch.from_numpy(self.rows), row_count=len(self.lengths))


def random_rows(*, seed: int, spread: float = 0.5, lengths: Sequence[int] = LENGTHS) -> Rows:
    """Return rows whose policies differ by about ``spread`` in a log-probability, with one advantage for each row."""
    rng, tokens = np.random.default_rng(seed), sum(lengths)
    behaviour = -rng.uniform(0.1, 3, tokens)
    columns = {name: behaviour + spread * rng.standard_normal(tokens) for name in ("logprobs", "proximal", "reference")}
    advantages = np.repeat(rng.standard_normal(len(lengths)), lengths)
    entropy = rng.uniform(0, 2, tokens)
    return Rows({**columns, "behaviour": behaviour, "advantages": advantages, "entropy": entropy}, lengths)


def loss_and_gradient(loss: TokenLoss, rows: Rows) -> tuple[Doubles, Doubles, dict[str, torch.Tensor]]:
    """Return the loss of each token, the gradient of their sum by the log-probabilities, and the metrics."""
    logprobs = torch.from_numpy(rows.columns["logprobs"].copy()).requires_grad_()
    per_token, metrics = loss(rows.inputs(logprobs))
    (gradient,) = torch.autograd.grad(per_token.sum(), logprobs)
    return per_token.detach().numpy(), gradient.numpy(), metrics
