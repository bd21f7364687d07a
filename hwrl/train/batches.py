"""From prompt groups to a batch: overlong responses, the shares of ranks, the weights of rows, padded rows."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from hwrl.errors import EngineError
from hwrl.interfaces import Batch, PromptGroup
from hwrl.train.choices import AggregationMode


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


def divide_rows(costs: Sequence[int], *, mini_batches: int, shares: int) -> list[list[list[int]]]:
    """Return the row indices of each share of each mini-batch. ``costs`` has the cost of each row; only ratios count.

    The mini-batches hold the rows in order, in equal numbers, so they do not depend on ``shares``. Each share of a
    mini-batch holds at least one row. Equal arguments give equal results on every rank. Raises EngineError if a
    mini-batch has fewer rows than shares.
    """
    if len(costs) < mini_batches * shares:
        raise EngineError(
            f"the step has too few responses for the trainer's ranks: {len(costs)}",
            why=f"{shares} ranks need a response each in each of {mini_batches} mini-batches, as they train together",
            fix="lower algorithm.mini_batches, train on fewer ranks or with more prompts a step",
        )
    parts = np.array_split(np.arange(len(costs)), mini_batches)
    return [_balance(part.tolist(), costs, shares=shares) for part in parts]


def imbalance(division: Sequence[Sequence[Sequence[int]]], costs: Sequence[int]) -> float:
    """Return the time of a step divided by the time with equal shares; 1.0 is the best.

    The ranks wait for each other in each mini-batch, so the cost of its costliest share counts as its time.
    """
    loads = [[sum(costs[row] for row in share) for share in part] for part in division]
    mean = sum(map(sum, loads)) / len(loads[0])
    return sum(map(max, loads)) / mean


def _balance(rows: Sequence[int], costs: Sequence[int], *, shares: int) -> list[list[int]]:
    """Give each row, the costliest first, to the share with the least cost; each share keeps the order of rows.

    This is Graham's longest-processing-time rule, https://doi.org/10.1137/0117039: the costliest share is at most 4/3
    of the optimum.
    """
    divided: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for row in sorted(rows, key=lambda row: -costs[row]):
        load, share = loads[0]
        divided[share].append(row)
        heapq.heapreplace(loads, (load + costs[row], share))
    return [sorted(share) for share in divided]


def row_weights(
    lengths: npt.ArrayLike, mini_batches: Sequence[Sequence[int]], *, mode: AggregationMode, constant: float
) -> npt.NDArray[np.float32]:
    """Return the factor for the losses of each row's tokens (float32, rows).

    Train engines take the mean over the tokens of a mini-batch. With the factors, this mean is: the mean over all
    tokens (``token-mean``); the mean over rows of a row's sum (``seq-mean-token-sum``) or of a row's mean
    (``seq-mean-token-mean``); or the mean over rows of a row's sum, divided by ``constant``
    (``seq-mean-token-sum-norm``: Dr. GRPO, arXiv:2503.20783 §3.1). ``lengths`` has the number of trained tokens of each
    row, and ``mini_batches`` the row indices of each mini-batch. Rows without a trained token do not count.
    """
    trained = np.asarray(lengths, dtype=np.float64)
    if mode == "token-mean":
        return np.ones(len(trained), dtype=np.float32)
    weights = np.zeros(len(trained))
    for rows in map(list, mini_batches):
        tokens, count = trained[rows].sum(), max(1, np.count_nonzero(trained[rows]))
        weights[rows] = tokens / count
    if mode == "seq-mean-token-mean":
        weights /= trained.clip(min=1)
    if mode == "seq-mean-token-sum-norm":
        weights /= constant
    return weights.astype(np.float32)


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
