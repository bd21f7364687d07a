"""Advantages and losses against their formulas, worked by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from hwrl.interfaces import LossInputs, PromptGroup, Response
from hwrl.train import PolicyLoss, mismatch_kl
from hwrl.train.batches import collate
from tests.support.single_turns import join_responses


def group_of(rewards: list[float], *, lengths: list[int] | None = None, prompt: int = 2) -> PromptGroup:
    responses = []
    for index, length in enumerate(lengths or [1] * len(rewards)):
        tokens = np.arange(length, dtype=np.int32) + 10 * (index + 1)
        responses.append(Response(tokens, -tokens.astype(np.float32), tokens * 0, truncated=False))
    return join_responses(
        responses,
        sequence_number=0,
        lease_id=0,
        incarnation=0,
        prompt_ids=np.arange(1, prompt + 1, dtype=np.int32),
        rewards=rewards,
        metrics={},
    )


def evaluate(loss: PolicyLoss, *, ratio: float, advantage: float, proximal: float | None = None) -> tuple[float, float]:
    """Return loss and gradient for one token whose probability is ``ratio`` times the behaviour policy's."""
    logprob = torch.tensor([math.log(ratio)], requires_grad=True)
    inputs = LossInputs(
        logprobs=logprob,
        behaviour=torch.zeros(1),
        proximal=None if proximal is None else torch.tensor([math.log(proximal)]),
        advantages=torch.tensor([advantage]),
        rows=torch.zeros(1, dtype=torch.int64),
        row_count=1,
        entropy=torch.zeros(1),
    )
    per_token, _ = loss(inputs)
    per_token.sum().backward()
    assert logprob.grad is not None
    return per_token.item(), logprob.grad.item()


def test_the_clipped_loss_stops_the_gradient_outside_the_trust_region_only_where_it_would_go_further() -> None:
    loss = PolicyLoss("ppo_clip", clip_low=0.2, clip_high=0.28)
    assert evaluate(loss, ratio=1.5, advantage=1.0) == pytest.approx((-1.28, 0.0))
    assert evaluate(loss, ratio=0.5, advantage=-1.0) == pytest.approx((0.8, 0.0))
    assert evaluate(loss, ratio=1.5, advantage=-1.0) == pytest.approx((1.5, 1.5))
    assert evaluate(loss, ratio=1.1, advantage=2.0) == pytest.approx((-2.2, -2.2))


def test_tis_truncates_the_weight_and_keeps_the_gradient() -> None:
    loss = PolicyLoss("tis", is_threshold=2.0)
    assert evaluate(loss, ratio=5.0, advantage=1.0)[1] == pytest.approx(-2.0)
    assert evaluate(loss, ratio=0.5, advantage=1.0)[1] == pytest.approx(-0.5)


def test_the_decoupled_loss_clips_around_the_proximal_policy_and_weights_by_the_behaviour_policy() -> None:
    loss = PolicyLoss("decoupled", clip_low=0.2, clip_high=0.28, is_threshold=2.0)
    assert loss.needs_proximal
    value, gradient = evaluate(loss, ratio=3.0, proximal=3.0, advantage=1.0)
    assert (value, gradient) == pytest.approx((-2.0, -2.0)), "ratio to proximal 1, weight 3 truncated to 2"
    assert evaluate(loss, ratio=3.0, proximal=1.5, advantage=1.0)[1] == pytest.approx(0.0)


def test_collate_lays_prompt_and_response_side_by_side_and_masks_the_response() -> None:
    group = group_of([1.0, 0.0], lengths=[1, 3])
    batch = collate([group], advantages=torch.tensor([1.0, -1.0]))
    assert batch.tokens.tolist() == [[1, 2, 10, 0, 0], [1, 2, 20, 21, 22]]
    assert batch.mask.tolist() == [[False, False, True, False, False], [False, False, True, True, True]]
    assert batch.behaviour_logprobs.tolist() == [[0, 0, -10, 0, 0], [0, 0, -20, -21, -22]]
    assert batch.trained_tokens == 4


def test_micro_batches_hold_the_budget_cover_each_row_once_and_are_at_most_half_padding() -> None:
    group = group_of([0.0] * 7, lengths=[1, 8, 2, 8, 1, 3, 30])
    batch = collate([group], advantages=torch.zeros(7))
    parts = list(batch.micro_batches(max_tokens=20))
    assert sorted(torch.cat(parts).tolist()) == list(range(7))
    assert [batch.select(part).tokens.shape for part in parts] == [(1, 32), (2, 10), (4, 5)]
    for part in batch.micro_batches(max_tokens=10_000):
        lengths = batch.lengths()[part]
        assert 2 * lengths.min() >= lengths.max()


def test_the_mismatch_is_the_divergence_of_the_trainer_from_the_behaviour_policy() -> None:
    generator = torch.Generator().manual_seed(0)
    behaviour, trainer = torch.randn(2, 50, generator=generator).log_softmax(-1)
    wanted = (behaviour.exp() * (behaviour - trainer)).sum()
    other = (trainer.exp() * (trainer - behaviour)).sum()
    assert abs(wanted - other) > 0.05
    expected = (behaviour.exp() * mismatch_kl(trainer, behaviour=behaviour)).sum()
    torch.testing.assert_close(expected, wanted)
    samples = torch.multinomial(behaviour.exp(), 100_000, replacement=True, generator=generator)
    drawn = mismatch_kl(trainer[samples], behaviour=behaviour[samples])
    assert drawn.min() >= 0
    assert drawn.mean() == pytest.approx(wanted.item(), rel=0.05)
