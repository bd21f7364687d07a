"""The keys of a run's algorithm: advantages, the loss, and the critic of PPO."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import AfterValidator, Field, model_validator

from hwrl.run.config.section import Section
from hwrl.run.config.values import (
    AbsolutePath,
    Function,
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Share,
    built_in_or_function,
)
from hwrl.train import AdvantageName, AggregationMode, ImportanceLevel, KlEstimator, LossName, RejectionMode

_WEIGHTED = ("tis", "decoupled")
"""The losses with importance weights of their own."""
_WITHOUT_BASELINE = ("gae", "reinforce_plus_plus")
"""The advantages that need no other response to the same prompt."""


class AlgorithmConfig(Section):
    """Advantages and loss; [algorithms](algorithms.md) has formulas and sources, and shows how to write your own."""

    advantage: Annotated[Function, AfterValidator(built_in_or_function(get_args(AdvantageName)))] = "grpo"
    """A built-in one: ``grpo``, ``dr_grpo``, ``rloo``, …; ``gae``: from a [critic](#critic); or your function."""
    loss: Annotated[Function, AfterValidator(built_in_or_function(get_args(LossName)))] = "ppo_clip"
    """A built-in one: ``ppo_clip``, ``tis``, ``decoupled``, ``gspo``, ``cispo``; or your function."""
    clip_ratio_low: Annotated[PositiveReal, Field(lt=1)] = 0.2
    """How far the ratio may fall below 1."""
    clip_ratio_high: PositiveReal = 0.28
    """How far the ratio may rise above 1."""
    rollout_is: ImportanceLevel = "token"
    """Importance weights of off-policy tokens (``tis`` and ``decoupled``): of each token, or of its ``sequence``."""
    rollout_is_threshold: PositiveReal = 2.0
    """Upper limit of these weights."""
    rollout_rs: RejectionMode | None = None
    """Reject a token by its ratio to the rollout's policy, or all tokens by their product or geometric mean."""
    rollout_rs_threshold: PositiveReal = 2.0
    """Largest ratio without rejection."""
    rollout_rs_threshold_lower: PositiveReal | None = None
    """Smallest ratio without rejection; null: 1 / ``rollout_rs_threshold``."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How tokens' losses become [one number](algorithms.md#aggregation)."""
    loss_scale_factor: PositiveReal | None = None
    """The divisor of ``seq-mean-token-sum-norm``; null: ``rollout.max_new_tokens``."""
    kl_coeff: NotNegativeReal = 0.0
    """Factor of the divergence from the starting model in the loss; 0: no such model is kept."""
    kl_estimator: KlEstimator = "k3"
    """How the divergence is estimated: ``k1``, ``k2`` or ``k3``."""
    entropy_coeff: NotNegativeReal = 0.0
    """Factor of the entropy that the loss rewards."""
    mask_truncated: bool = False
    """Leave truncated responses out of the loss."""
    overlong_buffer_tokens: NotNegative = 0
    """The last tokens before ``rollout.max_new_tokens`` in which a response loses reward; 0: none do."""
    overlong_penalty: NotNegativeReal = 1.0
    """The reward that a response of ``rollout.max_new_tokens`` loses."""
    ppo_epochs: Positive = 1
    """Passes over each batch."""
    mini_batches: Positive = 1
    """Optimizer steps per pass."""
    filter_groups: bool = False
    """Train only on prompts with different rewards ([dynamic sampling](training.md#dynamic-sampling))."""
    max_filtered_in_a_row: Positive = 1000
    """Prompts that may be filtered with no other finished prompt between them, before the run ends with an error."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> AlgorithmConfig:
        if self.rollout_is != "token" and self.loss not in _WEIGHTED:
            raise ValueError(f"rollout_is={self.rollout_is} is for loss={' or '.join(_WEIGHTED)}, not for {self.loss}")
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_factor is for loss_agg_mode=seq-mean-token-sum-norm, not {self.loss_agg_mode}"
            )
        if self.rollout_rs is None and (self.rollout_rs_threshold != 2 or self.rollout_rs_threshold_lower is not None):
            raise ValueError("rollout_rs_threshold rejects nothing without rollout_rs; set rollout_rs=token_k1, too")
        if self.rejection_band[0] >= self.rollout_rs_threshold:
            raise ValueError(
                f"rollout_rs_threshold_lower={self.rejection_band[0]:g} must be less than "
                f"rollout_rs_threshold={self.rollout_rs_threshold:g}"
            )
        return self

    @property
    def rejection_band(self) -> tuple[float, float]:
        """The smallest and the largest ratio without rejection."""
        return self.rollout_rs_threshold_lower or 1 / self.rollout_rs_threshold, self.rollout_rs_threshold

    @property
    def compares_responses(self) -> bool:
        """Whether advantages only come from differences between the responses to a prompt; a user's may not."""
        return ":" not in self.advantage and self.advantage not in _WITHOUT_BASELINE

    @property
    def has_critic(self) -> bool:
        """Whether a critic makes the advantages."""
        return self.advantage == "gae"


class CriticConfig(Section):
    """The critic of PPO, with ``algorithm.advantage=gae``: a second model, with one output, the value of each token.

    It has the policy's ``train``, ``optimizer`` and adapter settings, but for these.
    """

    path: AbsolutePath | None = None
    """The directory of the model that it starts from, with a new output layer; null: ``model.path``."""
    learning_rate: PositiveReal = 1e-5
    """Its highest value."""
    cliprange_value: PositiveReal = 0.2
    """How far from the old value the loss follows a value."""
    gamma: Annotated[PositiveReal, Field(le=1)] = 1.0
    """Discount of rewards, for each token of the policy."""
    lam: Share = 0.95
    """λ of generalized advantages: 1 trusts the rewards alone, 0 the next value alone."""
    kl_coef: NotNegativeReal = 0.0
    """Factor of the divergence from the starting model that each token's reward loses; 0: no such model is kept."""
    warmup_steps: NotNegative = 0
    """Training steps at the start in which the critic learns and the policy does not."""
