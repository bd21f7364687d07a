"""The keys of the sections ``algorithm`` (advantages and loss) and ``critic`` (for PPO)."""

from __future__ import annotations

from typing import Annotated, get_args

from pydantic import AfterValidator, Field, model_validator

from hwrl.run.config.values import (
    AbsolutePath,
    Function,
    NotNegative,
    NotNegativeReal,
    Positive,
    PositiveReal,
    Section,
    Share,
    built_in_or_function,
)
from hwrl.train import (
    WEIGHTED_LOSSES,
    AdvantageName,
    AggregationMode,
    ImportanceLevel,
    KlEstimator,
    LossName,
    RejectionMode,
)

_WITHOUT_BASELINE = ("gae", "reinforce_plus_plus")
"""The advantages that do not compare a response with others to the same prompt."""


_NO_LOSSES = {
    name: f"{name} is an advantage: set algorithm.advantage={name}; its loss is usually loss=ppo_clip"
    for name in get_args(AdvantageName)
} | {
    "ppo": "Input should be ppo_clip for the loss of PPO; its critic comes with algorithm.advantage=gae",
    "dapo": "DAPO is loss=ppo_clip with clip_ratio_high, filter_groups=true and overlong_buffer_tokens",
}
_NO_ADVANTAGES = {name: f"{name} is a loss: set algorithm.loss={name}" for name in get_args(LossName)} | {
    "ppo": "the advantages of PPO are advantage=gae, with a critic; its loss is algorithm.loss=ppo_clip",
    "dapo": "DAPO is advantage=grpo, with filter_groups=true and overlong_buffer_tokens",
}


class AlgorithmConfig(Section):
    """Advantages and loss; [algorithms](algorithms.md) has the formulas, and how to write your own."""

    advantage: Annotated[Function, AfterValidator(built_in_or_function(get_args(AdvantageName), _NO_ADVANTAGES))] = (
        "grpo"
    )
    """A built-in one: ``grpo``, ``dr_grpo``, ``rloo``, …; ``gae`` with a [critic](#critic); or your function."""
    loss: Annotated[Function, AfterValidator(built_in_or_function(get_args(LossName), _NO_LOSSES))] = "ppo_clip"
    """A built-in one: ``ppo_clip``, ``tis``, ``decoupled``, ``gspo``, ``cispo``; or your function."""
    clip_ratio_low: Annotated[PositiveReal, Field(lt=1)] = 0.2
    """Lower clip range: a ratio below 1 - ``clip_ratio_low`` is clipped."""
    clip_ratio_high: PositiveReal = 0.28
    """Upper clip range: a ratio above 1 + ``clip_ratio_high`` is clipped."""
    rollout_is: ImportanceLevel = "token"
    """Importance weights of off-policy tokens (``tis``, ``decoupled``): one per ``token``, or per ``sequence``."""
    rollout_is_threshold: PositiveReal = 2.0
    """Importance weights are truncated to this value."""
    rollout_rs: RejectionMode | None = None
    """Reject tokens by their ratio to the rollout policy, or whole responses by its product or geometric mean."""
    rollout_rs_threshold: PositiveReal = 2.0
    """Upper bound of accepted ratios."""
    rollout_rs_threshold_lower: PositiveReal | None = None
    """Lower bound of accepted ratios; null: 1 / ``rollout_rs_threshold``."""
    loss_agg_mode: AggregationMode = "token-mean"
    """How the losses of tokens are [aggregated](algorithms.md#aggregation) to one number."""
    loss_scale_factor: PositiveReal | None = None
    """Divisor for ``seq-mean-token-sum-norm``; null: ``rollout.max_new_tokens``."""
    kl_coeff: NotNegativeReal = 0.0
    """KL loss coefficient, for the divergence from the starting model; 0: no reference model is kept."""
    kl_estimator: KlEstimator = "k3"
    """Estimator of the KL divergence: ``k1``, ``k2`` or ``k3``."""
    entropy_coeff: NotNegativeReal = 0.0
    """Entropy bonus coefficient."""
    mask_truncated: bool = False
    """Exclude truncated responses from the loss."""
    overlong_buffer_tokens: NotNegative = 0
    """Length of the soft overlong zone (DAPO), the last tokens before ``rollout.max_new_tokens``; 0: no zone."""
    overlong_penalty: NotNegativeReal = 1.0
    """Penalty at the end of the overlong zone. It grows linearly from 0 at the start of the zone."""
    ppo_epochs: Positive = 1
    """Training passes over each batch."""
    mini_batches: Positive = 1
    """Mini-batches per pass: each makes one optimizer step."""
    filter_groups: bool = False
    """Train only on prompts whose rewards differ ([dynamic sampling](staleness.md#dynamic-sampling))."""
    max_filtered_in_a_row: Positive = 1000
    """Maximum number of prompts filtered without another finished prompt in between. One more ends the run."""

    @model_validator(mode="after")
    def _settings_have_an_effect(self) -> AlgorithmConfig:
        if self.rollout_is != "token" and self.loss not in WEIGHTED_LOSSES:
            losses = " or ".join(WEIGHTED_LOSSES)
            raise ValueError(f"rollout_is={self.rollout_is} is for loss={losses}, not for {self.loss}")
        if self.loss_scale_factor is not None and self.loss_agg_mode != "seq-mean-token-sum-norm":
            raise ValueError(
                f"loss_scale_factor is for loss_agg_mode=seq-mean-token-sum-norm, not {self.loss_agg_mode}"
            )
        if self.rollout_rs is None and (self.rollout_rs_threshold != 2 or self.rollout_rs_threshold_lower is not None):
            raise ValueError("rollout_rs_threshold has no effect without rollout_rs; also set rollout_rs=token_k1")
        if self.rejection_band[0] >= self.rollout_rs_threshold:
            raise ValueError(
                f"rollout_rs_threshold_lower={self.rejection_band[0]:g} must be less than "
                f"rollout_rs_threshold={self.rollout_rs_threshold:g}"
            )
        return self

    @property
    def rejection_band(self) -> tuple[float, float]:
        """The lower and the upper bound of accepted ratios."""
        return self.rollout_rs_threshold_lower or 1 / self.rollout_rs_threshold, self.rollout_rs_threshold

    @property
    def compares_responses(self) -> bool:
        """Whether an advantage compares the responses to a prompt. Taken as False for a user's function."""
        return ":" not in self.advantage and self.advantage not in _WITHOUT_BASELINE

    @property
    def has_critic(self) -> bool:
        """Whether the advantages come from a critic."""
        return self.advantage == "gae"


class CriticConfig(Section):
    """The critic of PPO, for ``algorithm.advantage=gae``: a second model, which outputs a value for each token.

    Its other settings are those of the policy: ``train``, ``optimizer`` and the adapter.
    """

    path: AbsolutePath | None = None
    """Directory of the model from which the critic starts, with a new output layer; null: ``model.path``."""
    learning_rate: PositiveReal = 1e-5
    """Peak learning rate of the critic."""
    cliprange_value: PositiveReal = 0.2
    """Value clip range: the loss clips a value to this distance from the old value."""
    gamma: Annotated[PositiveReal, Field(le=1)] = 1.0
    """Discount factor of rewards, per token of the policy."""
    lam: Share = 0.95
    """GAE lambda: 1 uses only rewards, 0 only the value of the next token."""
    kl_coeff: NotNegativeReal = 0.0
    """KL penalty coefficient in the rewards, per token (PPO); 0: no reference model is kept."""
    warmup_steps: NotNegative = 0
    """Training steps at the start that train only the critic."""
