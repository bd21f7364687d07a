"""Advantages from the rewards of groups: pure functions in float64, each with its source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from hwrl.errors import DataError, in_one_line, lines_of
from hwrl.interfaces import Advantage, PromptGroup

Doubles = npt.NDArray[np.float64]

_ROUNDING = 1e-6
"""Sums of float32 rewards that differ by less, relative to the largest, are equal."""


def group_advantages(groups: Sequence[PromptGroup], *, estimator: str | Advantage) -> torch.Tensor:
    """Return one advantage per row (float32, all groups in order), or one per element of the groups' ``token_ids``.

    ``estimator`` is one of :data:`~hwrl.train.AdvantageName`, or a function of the user. A built-in one gives
    advantages per token if a group has ``token_rewards``.

    ``grpo``: (r - mean) / (std + 1e-6), DeepSeekMath, arXiv:2402.03300 §4.1. ``dr_grpo``: r - mean, arXiv:2503.20783
    §3. ``rloo``: r - mean of the other samples, arXiv:2402.14740 §2. ``reinforce_plus_plus``: r, whitened over the
    tokens of all groups; ``reinforce_plus_plus_baseline``: r - mean, whitened, too (arXiv:2501.03262).

    ``mean`` and ``std`` are taken over the samples of a prompt. A sample with several rows counts once, with the mean
    reward of its rows. The reward of a row is its own reward plus the rewards of all its tokens. For one token, r is
    the row's own reward plus the rewards from this token on. With ``grpo``, a group with equal rewards gives zeros.

    Raises DataError if a user's function returns other shapes or numbers that are not finite.
    """
    known = _ESTIMATORS.get(estimator) if isinstance(estimator, str) else None
    if known is None:
        assert not isinstance(estimator, str), f"{estimator} is no advantage"
        return torch.from_numpy(_checked(groups, estimator))
    per_token = any(group.token_rewards is not None for group in groups)
    found = np.concatenate([_of_group(group, known, per_token=per_token) for group in groups])
    if known.whitened:
        found = _whiten(found, groups, per_token=per_token)
    return torch.from_numpy(found.astype(np.float32))


@dataclass(frozen=True)
class _Estimator:
    """``baseline`` and ``scale`` are functions of the rewards of a group's samples."""

    baseline: Callable[[Doubles], Doubles]
    scale: Callable[[Doubles], float] = lambda rewards: 1.0
    whitened: bool = False


def _mean(rewards: Doubles) -> Doubles:
    return np.full(len(rewards), rewards.mean())


def _mean_of_others(rewards: Doubles) -> Doubles:
    """Return the mean of the other samples; a single sample is its own baseline."""
    return (rewards.sum() - rewards) / (len(rewards) - 1) if len(rewards) > 1 else rewards


def _inverse_deviation(rewards: Doubles) -> float:
    """Return 1 / (std + 1e-6); 0 if the rewards differ by no more than the rounding of float32.

    Without the exception, tokens after a turn's reward get -1e6 times that reward if all samples earn the same.
    """
    deviation = float(rewards.std())
    return 1 / (deviation + 1e-6) if deviation > _ROUNDING * float(np.abs(rewards).max()) else 0.0


_ESTIMATORS = {
    "grpo": _Estimator(_mean, _inverse_deviation),
    "dr_grpo": _Estimator(_mean),
    "rloo": _Estimator(_mean_of_others),
    "reinforce_plus_plus": _Estimator(np.zeros_like, whitened=True),
    "reinforce_plus_plus_baseline": _Estimator(_mean, whitened=True),
}


def _of_group(group: PromptGroup, estimator: _Estimator, *, per_token: bool) -> Doubles:
    """Return the advantages of the group's rows, or of their tokens."""
    rewards = group.rewards.astype(np.float64) + _sums(group)
    _, sample = np.unique(group.samples, return_inverse=True)
    samples = np.bincount(sample, weights=rewards) / np.bincount(sample)
    baseline, scale = estimator.baseline(samples)[sample], estimator.scale(samples)
    if not per_token:
        return (rewards - baseline) * scale
    earned = np.zeros(len(group.token_ids)) if group.token_rewards is None else group.token_rewards.astype(np.float64)
    later = [earned[span][::-1].cumsum()[::-1] for span in group.responses()]
    return (np.concatenate(later) + np.repeat(group.rewards - baseline, group.lengths)) * scale


def _sums(group: PromptGroup) -> Doubles:
    """Return the sum of each row's rewards of tokens."""
    if group.token_rewards is None:
        return np.zeros(group.size)
    return np.array([group.token_rewards[span].sum(dtype=np.float64) for span in group.responses()])


def _whiten(values: Doubles, groups: Sequence[PromptGroup], *, per_token: bool) -> Doubles:
    """Return ``values`` with mean 0 and variance 1 (unbiased) over the policy's tokens of all groups."""
    counts = np.concatenate([group.loss_mask if per_token else group.policy_lengths for group in groups])
    total = int(counts.sum())
    if total < 2:
        return np.zeros_like(values)
    mean = float((values * counts).sum()) / total
    variance = float((np.square(values - mean) * counts).sum()) / (total - 1)
    whitened: Doubles = (values - mean) / np.sqrt(variance + 1e-8)
    return whitened


def _checked(groups: Sequence[PromptGroup], function: Advantage) -> npt.NDArray[np.float32]:
    """Return the advantages of a user's function as float32. Raises DataError."""
    rows, tokens = sum(group.size for group in groups), sum(len(group.token_ids) for group in groups)
    name = getattr(function, "__name__", repr(function))
    try:
        values = np.asarray(function(groups), dtype=np.float32)
    except Exception as exc:
        raise DataError(
            f"the advantages of {name} cannot be computed",
            why=f"{in_one_line(exc)}{lines_of(exc)}",
            fix="correct the function that algorithm.advantage names; it returns a NumPy array",
        ) from exc
    if values.shape not in ((rows,), (tokens,)):
        raise DataError(
            f"the advantages of {name} have the shape {values.shape}",
            why=f"the groups have {rows} rows and {tokens} tokens",
            fix="return one number for each row, or one for each of the groups' token_ids",
        )
    if not np.isfinite(values).all():
        raise DataError(
            f"the advantages of {name} are not all finite",
            why=f"number {int(np.flatnonzero(~np.isfinite(values))[0])} is not",
            fix="look for a division by a group's standard deviation of 0",
        )
    return values
