"""Make padded rows, a training batch, from prompt groups."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hwrl.interfaces import Batch, PromptGroup


def collate(groups: Sequence[PromptGroup], *, advantages: torch.Tensor, rows: Sequence[int] | None = None) -> Batch:
    """Return the batch of the trajectories of ``groups``: all, or those with the indices ``rows``, in their order.

    A trajectory's index counts those of all groups in order. ``advantages`` (float32) has one number for each
    trajectory, or one for each of the groups' ``token_ids``.
    """
    starts = np.cumsum([0, *(len(group.token_ids) for group in groups)])
    places = [(group, span, start) for group, start in zip(groups, starts, strict=False) for span in group.responses()]
    chosen = [places[row] for row in (range(len(places)) if rows is None else rows)]
    length = max(len(group.prompt_ids) + span.stop - span.start for group, span, _ in chosen)
    tokens = np.zeros((len(chosen), length), dtype=np.int64)
    mask = np.zeros((len(chosen), length), dtype=bool)
    logprobs = np.zeros((len(chosen), length), dtype=np.float32)
    of_tokens = None if len(advantages) == len(places) else torch.zeros(len(chosen), length)
    for index, (group, span, start) in enumerate(chosen):
        own = slice(prompt := len(group.prompt_ids), prompt + span.stop - span.start)
        tokens[index, :prompt] = group.prompt_ids
        tokens[index, own] = group.token_ids[span]
        logprobs[index, own] = group.logprobs[span]
        mask[index, own] = group.loss_mask[span]
        if of_tokens is not None:
            of_tokens[index, own] = advantages[start + span.start : start + span.stop]
    if of_tokens is None:
        of_tokens = advantages if rows is None else advantages[list(rows)]
    return Batch(torch.from_numpy(tokens), torch.from_numpy(mask), torch.from_numpy(logprobs), of_tokens)


def token_rewards(groups: Sequence[PromptGroup]) -> torch.Tensor:
    """Return one reward for each of the groups' ``token_ids`` (float32): a trajectory's own is at its last token."""
    found = []
    for group in groups:
        own = group.token_rewards
        rewards = np.zeros(len(group.token_ids), dtype=np.float32) if own is None else own.astype(np.float32)
        rewards[group.lengths.cumsum() - 1] += group.rewards
        found.append(rewards)
    return torch.from_numpy(np.concatenate(found))
