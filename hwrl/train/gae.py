"""Generalized advantage estimation (GAE), for rows in which others wrote tokens, too."""

from __future__ import annotations

import torch


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
