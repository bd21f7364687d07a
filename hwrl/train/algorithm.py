"""How a batch becomes optimizer steps: :class:`Algorithm`."""

from __future__ import annotations

from dataclasses import dataclass

from hwrl.interfaces import Advantage, TokenLoss
from hwrl.train.batches import Overlong
from hwrl.train.choices import AggregationMode


@dataclass(frozen=True)
class Algorithm:
    """How a batch becomes optimizer steps: ``ppo_epochs`` passes over it, each in ``mini_batches`` parts.

    ``advantage`` is a name of :data:`~hwrl.train.AdvantageName`, or a function. ``aggregation`` combines the losses of
    tokens into one number; ``loss_constant`` is the divisor of its mode ``seq-mean-token-sum-norm``. In the first
    ``critic_warmup`` steps of a run only the critic learns.
    """

    loss: TokenLoss
    advantage: str | Advantage = "grpo"
    ppo_epochs: int = 1
    mini_batches: int = 1
    aggregation: AggregationMode = "token-mean"
    loss_constant: float = 1.0
    overlong: Overlong | None = None
    critic_warmup: int = 0
