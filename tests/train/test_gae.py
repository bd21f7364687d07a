"""Generalized advantages against tables worked out by hand, and against the definition as a sum."""

from __future__ import annotations

import pytest
import torch

from hwrl.train.critic import generalized_advantages

# γ = 0.5, λ = 0.5. One prompt's token, then four of the policy; the reward 1 is at the last one.
#   V      0.2   0.4   0.6   0.8
#   δ      0.0  -0.1  -0.2   0.2      δ = r + 0.5·V′ − V
#   A    -0.03125  -0.125  -0.15  0.2    A = δ + 0.25·A′: -0.2 + 0.05, -0.1 - 0.0375, ...
VALUES = [9.0, 0.2, 0.4, 0.6, 0.8]
BY_HAND = [0.0, 0.0 + 0.25 * -0.1375, -0.1 + 0.25 * -0.15, -0.2 + 0.25 * 0.2, 0.2]


def row(*numbers: float) -> torch.Tensor:
    return torch.tensor([numbers])


def test_advantages_of_one_response_are_those_worked_out_by_hand() -> None:
    mask = row(0, 1, 1, 1, 1).bool()
    advantages, returns = generalized_advantages(row(0, 0, 0, 0, 1), row(*VALUES), mask, gamma=0.5, lam=0.5)
    assert advantages[0].tolist() == pytest.approx(BY_HAND)
    assert returns[0].tolist() == pytest.approx([0.0, *(a + v for a, v in zip(BY_HAND[1:], VALUES[1:], strict=True))])


def test_tokens_of_others_take_no_step() -> None:
    plain = generalized_advantages(row(0, 0, 0.3, 0, 1), row(*VALUES), row(0, 1, 1, 1, 1).bool(), gamma=0.5, lam=0.5)
    # The same row with two tokens of a tool behind the second one, and padding at its end.
    mask = row(0, 1, 1, 0, 0, 1, 1, 0).bool()
    values, rewards = row(9.0, 0.2, 0.4, 7.0, 7.0, 0.6, 0.8, 5.0), row(0, 0, 0.3, 0, 0, 0, 1, 0)
    divided = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.5)
    for one, other in zip(plain, divided, strict=True):
        assert other[mask].tolist() == pytest.approx(one[0, 1:].tolist())
        assert not other[~mask].any()


def test_the_recursion_is_the_sum_of_the_paper() -> None:
    generator = torch.Generator().manual_seed(0)
    shape, gamma, lam = (5, 23), 0.97, 0.9
    rewards, values = (torch.randn(shape, generator=generator) for _ in range(2))
    mask = torch.rand(shape, generator=generator) < 0.6
    mask[4] = False
    rewards = rewards * mask
    advantages, returns = generalized_advantages(rewards, values, mask, gamma=gamma, lam=lam)
    for one in range(len(mask)):
        r, v = rewards[one, mask[one]].double(), values[one, mask[one]].double()
        after = torch.cat([v[1:], torch.zeros(1)]) if len(v) else v
        delta = r + gamma * after - v
        for step in range(len(v)):
            wanted = sum((gamma * lam) ** (later - step) * delta[later] for later in range(step, len(v)))
            assert advantages[one, mask[one]][step].item() == pytest.approx(float(wanted), abs=1e-6)
            assert returns[one, mask[one]][step].item() == pytest.approx(float(wanted + v[step]), abs=1e-6)


def test_lambda_1_makes_returns_of_discounted_rewards_and_lambda_0_one_step() -> None:
    mask, rewards, values = row(1, 1, 1).bool(), row(1, 0, 2), row(0.3, 0.5, 0.7)
    _, returns = generalized_advantages(rewards, values, mask, gamma=0.5, lam=1.0)
    assert returns[0].tolist() == pytest.approx([1 + 0.25 * 2, 0.5 * 2, 2])
    advantages, _ = generalized_advantages(rewards, values, mask, gamma=0.5, lam=0.0)
    assert advantages[0].tolist() == pytest.approx([1 + 0.25 - 0.3, 0.35 - 0.5, 2 - 0.7])
