"""The critic of PPO: a transformer with one output, the value of each state: :class:`CriticEngine`."""

from __future__ import annotations

import contextlib
import functools
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hwrl.interfaces import Backend, Batch, EngineSettings, LoraSettings
from hwrl.lora import with_adapter
from hwrl.models import build_meta_model, logits_at
from hwrl.train.causal import CausalModel, model_inputs
from hwrl.train.fsdp import FsdpEngine
from hwrl.train.loading import VALUE_WEIGHT
from hwrl.train.packing import MicroBatch

if TYPE_CHECKING:
    from hwrl.comm import Group

_FIRST_VALUES = 0.01
"""The typical value of a new critic: near 0, so that the first advantages are the returns."""


@dataclass(frozen=True)
class ValueLoss:
    """The clipped squared error of values, token by token.

    ½ · max((V − R)², (V_clipped − R)²), where V_clipped is within ``clip`` of the value before the step. It limits the
    values as PPO limits the policy; see Schulman et al. 2017, https://arxiv.org/abs/1707.06347, and Engstrom et al.
    2020, https://arxiv.org/abs/2005.12729 §3, for the formula.
    """

    clip: float = 0.2

    def __call__(
        self, values: torch.Tensor, *, before: torch.Tensor, returns: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the metrics of each token; all tensors have one shape."""
        clipped = before + (values - before).clamp(-self.clip, self.clip)
        plain, bounded = (values - returns).square(), (clipped - returns).square()
        return torch.maximum(plain, bounded) / 2, {"clipped": (bounded > plain).detach()}


class ValueHead(torch.nn.Module):
    """An output layer with one number for each hidden state, a float32; its first weights depend on ``seed`` only."""

    def __init__(self, width: int, *, seed: int) -> None:
        super().__init__()
        first = torch.randn(width, generator=torch.Generator().manual_seed(seed))
        self.register_parameter(VALUE_WEIGHT, torch.nn.Parameter(first * (_FIRST_VALUES / math.sqrt(width))))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ... × 1 from ``hidden`` (... × width)."""
        weight: torch.Tensor = getattr(self, VALUE_WEIGHT)
        return (hidden.float() @ weight.float())[..., None]


def with_value_head(model: Any, *, seed: int) -> Any:
    """Replace the output layer of ``model``, in place, by a :class:`ValueHead` on the host; return the model."""
    width = model.get_output_embeddings().weight.shape[1]
    model.set_output_embeddings(ValueHead(width, seed=seed))
    return model


@functools.lru_cache(maxsize=4)
def described_critic(directory: Path, *, dtype: torch.dtype, lora: LoraSettings | None) -> Any:
    """Return a critic on the meta device, but for its output layer: see :func:`described_model`."""
    model = build_meta_model(directory, dtype=torch.float32)
    adapted = model if lora is None else with_adapter(model, lora, seed=0, base_dtype=dtype)
    return with_value_head(adapted, seed=0)


class ValueModel(CausalModel):
    """How to call a model with a :class:`ValueHead`. Its scores are the values, and zeros (2 × targets, float32)."""

    def _choose_output(self, model: Any, batch: Batch) -> None:
        """Keep the output layer: it is small."""

    def _from_logits(self, model: Any, part: MicroBatch) -> torch.Tensor:
        values = logits_at(model, part.places, **model_inputs(part))[:, 0].float()
        return torch.stack([values, torch.zeros_like(values)])

    def _distance(self, model: Any, part: MicroBatch, wanted: torch.Tensor) -> float:
        return super()._distance(model, part, wanted) / (
            float(wanted.abs().nanmean()) or 1.0
        )  # a new critic's is small


class CriticEngine(FsdpEngine):
    """Trains a value model: the model in ``settings.model_directory`` with a new output layer.

    It gives each token a value, the expected return before the token; the hidden state is the one that predicts the
    token. With ``settings.lora`` it trains an adapter and the output layer. It publishes no weights. See
    :class:`FsdpEngine` for all else.

    A step uses it like this::

        batch, metrics = critic.estimate(batch, rewards)
        ...  # train the policy on the batch
        with critic.on_device(optimizer=True):
            metrics |= critic.fit(batch)
    """

    _calls = ValueModel

    def __init__(
        self,
        settings: EngineSettings,
        *,
        backend: Backend,
        group: Group | None,
        gamma: float = 1.0,
        lam: float = 1.0,
        loss: ValueLoss = ValueLoss(),
        kl_coeff: float = 0.0,
    ) -> None:
        self._gamma, self._lam, self._value_loss, self._kl_coeff = gamma, lam, loss, kl_coeff
        super().__init__(settings, backend=backend, group=group)

    def _adapted(self, model: Any) -> Any:
        self._vocabulary = model.get_output_embeddings().weight.shape[1]  # the head copies the states to float32
        return with_value_head(super()._adapted(model), seed=self.settings.seed)

    @property
    def needs_reference(self) -> bool:
        """Whether :meth:`estimate` needs the reference's log-probabilities."""
        return self._kl_coeff != 0

    # -- values ---------------------------------------------------------------------------------------------------

    def estimate(self, batch: Batch, rewards: torch.Tensor) -> tuple[Batch, dict[str, float]]:
        """Return ``batch`` with values, returns and advantages, token by token, and metrics of all ranks' tokens.

        ``rewards`` (rows × length, float32) come after each token. First, ``kl_coeff`` × (log-probability of the
        behaviour policy − of the reference) is subtracted from each token's reward (Ziegler et al. 2019,
        https://arxiv.org/abs/1909.08593 §2). The advantages have mean 0 and standard deviation 1 over the tokens of all
        ranks. Offloaded parameters are on the device only during the call.
        """
        metrics = {}
        if self.needs_reference:
            assert batch.reference_logprobs is not None, "the trainer adds them"
            kl = (batch.behaviour_logprobs - batch.reference_logprobs) * batch.mask
            rewards = rewards - self._kl_coeff * kl
            metrics["reference_kl"] = self._moments(kl[batch.mask])[0]
        with self.on_device(optimizer=False):
            values = self.logprobs(batch)
        advantages, returns = generalized_advantages(rewards, values, batch.mask, gamma=self._gamma, lam=self._lam)
        mean, variance = self._moments(advantages[batch.mask])
        whitened = (advantages - mean) / (math.sqrt(variance) + 1e-8) * batch.mask
        return_mean, return_variance = self._moments(returns[batch.mask])
        value_mean, _ = self._moments(values[batch.mask])
        _, error_variance = self._moments((returns - values)[batch.mask])
        explained = 1 - error_variance / return_variance if return_variance else 0.0
        metrics |= {"explained_variance": explained, "value_mean": value_mean, "return_mean": return_mean}
        return replace(batch, values=values, returns=returns, advantages=whitened), metrics

    def _moments(self, numbers: torch.Tensor) -> tuple[float, float]:
        """Return mean and variance of the ``numbers`` of all ranks."""
        total, count = self._reduce([float(numbers.sum()), float(len(numbers))], op="sum")
        mean = total / max(1.0, count)
        (squares,) = self._reduce([float((numbers - mean).square().sum())], op="sum")
        return mean, squares / max(1.0, count)

    # -- training -------------------------------------------------------------------------------------------------

    def fit(self, batch: Batch) -> dict[str, float]:
        """Take one optimizer step on a batch with values and returns; return metrics averaged over all ranks' tokens.

        Raises NonFiniteGradientError on all ranks, with unchanged weights, if the gradients are not finite.
        """
        return self.train_batch(batch, loss=_NO_POLICY)

    def _scoring_for(self, *args: Any) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _loss(
        self, part: MicroBatch, values: torch.Tensor, _: torch.Tensor, *, loss: Any
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        assert part.values is not None and part.returns is not None, "estimate adds them"
        per_token, metrics = self._value_loss(values, before=part.values, returns=part.returns)
        total = per_token.sum()
        sums = {name: value.sum().double() for name, value in metrics.items()}
        return total, {"loss": total.detach().double(), **sums}


_NO_POLICY: Any = None
"""A critic has a loss of its own."""


def generalized_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lam: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return advantages and returns (rows × length, float32; 0 off the mask).

    ``values`` (rows × length) are the critic's expectations before each token, and ``rewards`` (rows × length) come
    after it. ``mask`` (rows × length, bool) is true on the policy's tokens: each is one step. Tokens of others take no
    step and no time: the value after a policy's token is that before its next one, and 0 after its last one.

    δ = r + γ·V′ − V and A = δ + γ·λ·A′ from the last token backwards, in float64; a return is A + V. Schulman et al.
    2016, https://arxiv.org/abs/1506.02438 eq. 16.
    """
    columns = mask.t().contiguous()
    reward, value = rewards.double().t().contiguous(), values.double().t().contiguous()
    advantages = torch.zeros_like(reward)
    next_value, advantage = (torch.zeros(len(mask), dtype=torch.float64) for _ in range(2))
    for place in range(len(columns) - 1, -1, -1):
        own = columns[place]
        delta = reward[place] + gamma * next_value - value[place]
        advantage = torch.where(own, delta + gamma * lam * advantage, advantage)
        next_value = torch.where(own, value[place], next_value)
        advantages[place] = advantage
    found = advantages.t() * mask
    return found.float(), ((found + values.double()) * mask).float()
