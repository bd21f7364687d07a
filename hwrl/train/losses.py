"""Advantages and policy losses: pure functions of tensors, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hwrl.interfaces import LossInputs, PromptGroup
from hwrl.train.choices import AdvantageName, LossName


def group_advantages(groups: Sequence[PromptGroup], *, estimator: AdvantageName) -> torch.Tensor:
    """Return one advantage a response (float32, all groups in order), from the rewards of its own group.

    ``grpo``: (r − mean) / (std + 1e-6), DeepSeekMath, arXiv:2402.03300 §4.1. ``dr_grpo``: r − mean,
    arXiv:2503.20783 §3. ``rloo``: r − mean of the others, arXiv:2402.14740 §2. A group whose rewards are all equal
    gives zeros: it teaches nothing.
    """
    per_group = [_ESTIMATORS[estimator](group.rewards.astype(np.float64)) for group in groups]
    return torch.from_numpy(np.concatenate(per_group).astype(np.float32))


_Doubles = npt.NDArray[np.float64]


def _grpo(rewards: _Doubles) -> _Doubles:
    return _dr_grpo(rewards) / (float(rewards.std()) + 1e-6)


def _dr_grpo(rewards: _Doubles) -> _Doubles:
    centred: _Doubles = rewards - rewards.mean()
    return centred


def _rloo(rewards: _Doubles) -> _Doubles:
    others = max(1, len(rewards) - 1)
    return _dr_grpo(rewards) * (len(rewards) / others)


_ESTIMATORS: dict[str, Callable[[_Doubles], _Doubles]] = {"grpo": _grpo, "dr_grpo": _dr_grpo, "rloo": _rloo}


@dataclass(frozen=True)
class PolicyLoss:
    """A loss per token, and how it treats data from older policies.

    ``ppo_clip``: the clipped surrogate (PPO, arXiv:1707.06347 eq. 7; the higher upper bound, DAPO, arXiv:2503.14476
    §3.1) on the ratio to the *behaviour* policy, so that staleness is inside the trust region. ``tis``: the policy
    gradient weighted by the ratio to the behaviour policy, truncated at ``is_threshold`` (truncated importance
    sampling). ``decoupled``: the clipped surrogate on the ratio to the *proximal* policy, weighted by the truncated
    ratio of proximal to behaviour (AReaL, arXiv:2505.24298 §5.2).
    """

    name: LossName = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.28
    is_threshold: float = 2.0

    @property
    def token_local(self) -> bool:
        """Whether a token's loss depends on this token alone."""
        return True

    @property
    def needs_proximal(self) -> bool:
        """Whether the log-probabilities at the start of the step must be computed."""
        return self.name == "decoupled"

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen policy's log-probabilities must be computed: never."""
        return False

    @property
    def needs_entropy_gradient(self) -> bool:
        """Whether the entropy needs a gradient: never."""
        return False

    def __call__(self, inputs: LossInputs, /) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the metrics of each token, as :class:`~hwrl.interfaces.TokenLoss` says."""
        logprobs, behaviour, advantages = inputs.logprobs, inputs.behaviour, inputs.advantages
        weight = (logprobs.detach() - behaviour).exp()
        if self.name == "tis":
            truncated = weight.clamp(max=self.is_threshold)
            return -truncated * advantages * logprobs, {"is_weight": truncated, "clipped": weight > self.is_threshold}
        if self.name == "ppo_clip":
            loss, clipped = self._clipped(logprobs, behaviour, advantages)
            return loss, {"is_weight": weight, "clipped": clipped}
        proximal = inputs.proximal
        assert proximal is not None, "the decoupled loss needs proximal log-probabilities"
        correction = (proximal - behaviour).exp().clamp(max=self.is_threshold)
        loss, clipped = self._clipped(logprobs, proximal, advantages)
        return correction * loss, {"is_weight": correction, "clipped": clipped}

    def _clipped(
        self, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ratio = (logprobs - old).exp()
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
