"""Long responses: mask truncated ones, and take reward from those near the limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hwrl.interfaces import PromptGroup


@dataclass(frozen=True)
class Overlong:
    """What happens to long responses (DAPO, arXiv:2503.14476 §3.4).

    With ``masks_truncated``, no token of a truncated row is trained; its reward still counts in its group's baseline.
    With ``buffer_tokens``, a row with more than ``max_tokens - buffer_tokens`` tokens of the policy loses reward:
    linearly up to ``penalty``, at ``max_tokens`` and beyond.
    """

    masks_truncated: bool = False
    buffer_tokens: int = 0
    max_tokens: int = 0
    penalty: float = 1.0

    def apply(self, groups: Sequence[PromptGroup]) -> tuple[Sequence[PromptGroup], dict[str, float]]:
        """Return the groups with other rewards and loss masks, and the metric ``reward/overlong_penalty``."""
        metrics = {}
        if self.buffer_tokens:
            groups, penalties = zip(*map(self._punish, groups), strict=True)
            metrics["reward/overlong_penalty"] = float(np.concatenate(penalties).mean())
        if self.masks_truncated:
            groups = [_mask_truncated(group) for group in groups]
        return groups, metrics

    def _punish(self, group: PromptGroup) -> tuple[PromptGroup, np.ndarray[tuple[int], np.dtype[np.float32]]]:
        excess = group.policy_lengths - (self.max_tokens - self.buffer_tokens)
        penalties = (excess / self.buffer_tokens).clip(0, 1).astype(np.float32) * np.float32(self.penalty)
        return replace(group, rewards=group.rewards - penalties), penalties


def _mask_truncated(group: PromptGroup) -> PromptGroup:
    if not group.truncated.any():
        return group
    return replace(group, loss_mask=group.loss_mask & ~np.repeat(group.truncated, group.lengths))
