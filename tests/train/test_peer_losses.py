"""Losses, aggregation and advantages against verl's and TRL's own code, where they are installed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hwrl.interfaces import TokenLoss
from hwrl.train import (
    AdvantageName,
    AggregationMode,
    KlEstimator,
    LossName,
    Objective,
    PolicyLoss,
)
from hwrl.train.advantages import group_advantages
from hwrl.train.batches import row_weights
from hwrl.train.objective import kl_penalty
from tests.support.loss_inputs import Rows, random_rows
from tests.support.near import assert_near
from tests.support.peer_losses import VerlConfig, needs_trl, needs_verl, trl_loss, verl_algorithms
from tests.support.rewarded_groups import group_of

MODES: list[AggregationMode] = [
    "token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


def own_loss(loss: TokenLoss, rows: Rows, mode: AggregationMode) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of one mini-batch, and its gradient by the log-probabilities (rows × length)."""
    padded = rows.padded("logprobs").requires_grad_()
    per_token, _ = loss(rows.inputs(padded[rows.mask.bool()]))
    weights = row_weights(rows.lengths, [range(len(rows.lengths))], mode=mode, constant=max(rows.lengths))
    mean = (per_token * torch.from_numpy(weights)[torch.from_numpy(rows.rows)]).mean()
    return mean.detach(), torch.autograd.grad(mean, padded)[0]


def columns_of(rows: Rows) -> dict[str, torch.Tensor]:
    columns = {name: rows.padded(name) for name in rows.columns}
    columns["logprobs"].requires_grad_()
    return columns


@needs_verl
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "theirs"), [("ppo_clip", "vanilla"), ("gspo", "gspo"), ("cispo", "cispo")])
def test_losses_are_those_of_verl(name: LossName, theirs: str, mode: AggregationMode) -> None:
    rows = random_rows(seed=0, spread=0.3)
    columns, loss = columns_of(rows), verl_algorithms()[f"compute_policy_loss_{theirs}"]
    arguments = (columns["behaviour"], columns["logprobs"], columns["advantages"], rows.mask)
    config = VerlConfig(clip_ratio_c=1e9)  # no dual clip
    found, _ = loss(*arguments, loss_agg_mode=mode, config=config)
    (gradient,) = torch.autograd.grad(found, columns["logprobs"])
    own, own_gradient = own_loss(PolicyLoss(name), rows, mode)
    assert_near(own, found.detach(), share=1e-5)
    assert_near(own_gradient, gradient, share=1e-5)


@needs_verl
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_divergences_are_those_of_verl(estimator: KlEstimator) -> None:
    rows = random_rows(seed=1)
    logprobs, reference = (torch.from_numpy(rows.columns[name]) for name in ("logprobs", "reference"))
    found = verl_algorithms()["kl_penalty"](logprobs, reference, estimator)
    torch.testing.assert_close(kl_penalty(logprobs, reference, estimator=estimator), found)


@needs_verl
@pytest.mark.parametrize(
    ("name", "theirs"),
    [
        ("grpo", "grpo"),
        ("rloo", "rloo"),
        ("reinforce_plus_plus", "reinforce_plus_plus"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline"),
    ],
)
def test_advantages_are_those_of_verl(name: AdvantageName, theirs: str) -> None:
    groups = [group_of([1.0, 0.0, 0.25], lengths=[2, 5, 1]), group_of([3.0, 1.0, 1.0], lengths=[4, 1, 3])]
    lengths = np.concatenate([group.lengths for group in groups])
    mask = (torch.arange(int(lengths.max())) < torch.from_numpy(lengths)[:, None]).float()
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(6), torch.from_numpy(lengths).long() - 1] = torch.from_numpy(
        np.concatenate([group.rewards for group in groups])
    )
    estimate = verl_algorithms()[f"compute_{theirs}_outcome_advantage"]
    arguments: dict[str, Any] = {"index": np.array([0, 0, 0, 1, 1, 1])} if theirs != "reinforce_plus_plus" else {}
    found, _ = estimate(rewards, mask, config=VerlConfig(), **arguments)
    own = group_advantages(groups, estimator=name)[:, None] * mask
    scale = np.sqrt(2 / 3) if name == "grpo" else 1.0  # verl divides by the unbiased deviation, the paper by the other
    assert_near(own * scale, found)


@needs_trl
@pytest.mark.parametrize(
    ("loss", "mode", "theirs"),
    [
        (PolicyLoss(), "seq-mean-token-mean", {"loss_type": "grpo"}),
        (PolicyLoss(), "token-mean", {"loss_type": "bnpo"}),
        (PolicyLoss(), "token-mean", {"loss_type": "dapo"}),
        (PolicyLoss(), "seq-mean-token-sum-norm", {"loss_type": "dr_grpo"}),
        (PolicyLoss("gspo"), "seq-mean-token-mean", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
        (PolicyLoss("cispo", clip_low=1.0), "token-mean", {"loss_type": "cispo", "epsilon_high": 1.28}),
        (Objective(PolicyLoss(), kl_coeff=0.04), "token-mean", {"loss_type": "dapo", "beta": 0.04}),
    ],
)
def test_losses_are_those_of_trl(loss: TokenLoss, mode: AggregationMode, theirs: dict[str, Any]) -> None:
    rows = random_rows(seed=2, spread=0.3)
    columns = columns_of(rows)
    columns["advantages"] = columns["advantages"][:, 0]  # one for each row
    found = trl_loss(columns, rows.mask, **theirs)
    (gradient,) = torch.autograd.grad(found, columns["logprobs"])
    own, own_gradient = own_loss(loss, rows, mode)
    assert_near(own, found.detach(), share=1e-5)
    assert_near(own_gradient, gradient, share=1e-5)
