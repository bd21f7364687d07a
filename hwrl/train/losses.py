"""Policy losses of tokens: pure functions of tensors, each with its source."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from hwrl.interfaces import LossInputs
from hwrl.train.choices import WEIGHTED_LOSSES, ImportanceLevel, LossName
from hwrl.train.objective import LossResult


@dataclass(frozen=True)
class PolicyLoss:
    """A built-in loss per token, and how it treats data from older policies.

    ``ppo_clip``: the clipped surrogate (PPO, arXiv:1707.06347 eq. 7; the higher upper bound, DAPO, arXiv:2503.14476
    §3.1) on the ratio to the *behaviour* policy, so that staleness is inside the trust region. ``tis``: the policy
    gradient weighted by the ratio to the behaviour policy, truncated at ``is_threshold`` (truncated importance
    sampling). ``decoupled``: the clipped surrogate on the ratio to the *proximal* policy, weighted by the truncated
    ratio of proximal to behaviour (AReaL, arXiv:2505.24298 §5.2). ``gspo``: the clipped surrogate on the geometric mean
    of a row's ratios to the behaviour policy (GSPO, arXiv:2507.18071 §4; its token form, §4.3). ``cispo``: the policy
    gradient weighted by the clipped ratio to the behaviour policy (CISPO, arXiv:2506.13585 §3.1). ``distill``: as
    ``tis``, with log reference - log policy in place of the advantages: the policy gradient of the reverse divergence
    from a teacher, the reference, on the policy's own samples (GKD, arXiv:2306.13649 §3.1; MiniLLM, arXiv:2306.08543
    §2.2, with each token's own term only).

    Weights (``tis``, ``decoupled``, ``distill``) are ratios of tokens, or with ``is_level`` "sequence" of whole rows.
    """

    name: LossName = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    is_threshold: float = 2.0
    is_level: ImportanceLevel = "token"
    needs_entropy_gradient: ClassVar[bool] = False

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen policy's log-probabilities must be computed: a teacher's."""
        return self.name == "distill"

    @property
    def token_local(self) -> bool:
        """Whether a token's loss depends on this token alone."""
        return self.name != "gspo" and (self.is_level == "token" or self.name not in WEIGHTED_LOSSES)

    @property
    def needs_proximal(self) -> bool:
        """Whether the log-probabilities at the start of the step must be computed."""
        return self.name == "decoupled"

    def __call__(self, inputs: LossInputs, /) -> LossResult:
        """Return the loss and the metrics of each token, as :class:`~hwrl.interfaces.TokenLoss` says."""
        compute = {
            "ppo_clip": self._ppo_clip,
            "tis": self._tis,
            "decoupled": self._decoupled,
            "gspo": self._gspo,
            "cispo": self._cispo,
            "distill": self._distill,
        }
        return compute[self.name](inputs)

    def _ppo_clip(self, inputs: LossInputs) -> LossResult:
        ratio = (inputs.logprobs - inputs.behaviour).exp()
        loss, clipped = self._clipped(ratio, inputs.advantages)
        return loss, {"is_weight": ratio.detach(), "clipped": clipped}

    def _tis(self, inputs: LossInputs) -> LossResult:
        weight, truncated = self._importance(inputs, inputs.logprobs.detach())
        return -weight * inputs.advantages * inputs.logprobs, {"is_weight": weight, "clipped": truncated}

    def _decoupled(self, inputs: LossInputs) -> LossResult:
        assert inputs.proximal is not None, "the decoupled loss needs proximal log-probabilities"
        weight, _ = self._importance(inputs, inputs.proximal)
        loss, clipped = self._clipped((inputs.logprobs - inputs.proximal).exp(), inputs.advantages)
        return weight * loss, {"is_weight": weight, "clipped": clipped}

    def _gspo(self, inputs: LossInputs) -> LossResult:
        logprobs = inputs.logprobs
        of_rows = inputs.row_means(logprobs.detach() - inputs.behaviour)
        ratio = (logprobs - logprobs.detach() + of_rows[inputs.rows]).exp()  # a token's gradient, times the row's ratio
        loss, clipped = self._clipped(ratio, inputs.advantages)
        return loss, {"is_weight": ratio.detach(), "clipped": clipped}

    def _cispo(self, inputs: LossInputs) -> LossResult:
        ratio = (inputs.logprobs.detach() - inputs.behaviour).exp()
        weight = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        return -weight * inputs.advantages * inputs.logprobs, {"is_weight": weight, "clipped": weight != ratio}

    def _distill(self, inputs: LossInputs) -> LossResult:
        assert inputs.reference is not None, "a distillation needs the teacher's log-probabilities"
        weight, truncated = self._importance(inputs, inputs.logprobs.detach())
        divergence = inputs.logprobs.detach() - inputs.reference
        metrics = {"is_weight": weight, "clipped": truncated, "reverse_kl": divergence}
        return weight * divergence * inputs.logprobs, metrics

    def _importance(self, inputs: LossInputs, newer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the truncated ratio of ``newer`` to the behaviour policy, and where it was truncated."""
        ratio = newer - inputs.behaviour
        if self.is_level == "sequence":
            ratio = inputs.row_sums(ratio)[inputs.rows]
        limit = math.log(self.is_threshold)
        return ratio.clamp(max=limit).exp(), ratio > limit  # clamp before exp: a long row would overflow

    def _clipped(self, ratio: torch.Tensor, advantages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bounded = ratio.clamp(1 - self.clip_low, 1 + self.clip_high)
        plain, clipped = ratio * advantages, bounded * advantages
        return -torch.minimum(plain, clipped), (clipped < plain).detach()


def mismatch_kl(logprobs: torch.Tensor, *, behaviour: torch.Tensor) -> torch.Tensor:
    """Return an estimate, token by token, of KL(behaviour ‖ trainer): Schulman's k3, never negative.

    The tokens must be samples of the behaviour policy: with r = logprobs − behaviour, the mean of exp(r) − 1 − r over
    them is the divergence, without bias.
    """
    ratio = logprobs - behaviour
    return ratio.exp() - 1 - ratio
