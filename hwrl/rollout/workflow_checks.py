"""Checks of what a run of a workflow returned, before anything is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from hwrl.errors import short_repr
from hwrl.interfaces import Trajectory
from hwrl.rollout.reward import metrics_of


def checked_sample(result: Any, *, max_length: int, vocabulary: int) -> Sequence[Trajectory]:
    """Return a run's trajectories, with float numbers.

    Raises ValueError or DataError if they cannot be trained: a trajectory has at most ``max_length`` tokens, with ids
    below ``vocabulary``.
    """
    sample = (result,) if isinstance(result, Trajectory) else result
    is_sample = isinstance(sample, Sequence) and all(isinstance(row, Trajectory) for row in sample)
    if not is_sample or not sample:
        raise ValueError(f"a workflow returns a Trajectory, or a sequence of them, not {short_repr(result)}")
    for row in sample:
        _check_segments(row, max_length, vocabulary)
    return [_with_floats(row) for row in sample]


def _with_floats(row: Trajectory) -> Trajectory:
    """Return ``row`` with its reward and metrics as floats: a user's number may be of any type, such as a tensor."""
    metrics = metrics_of({**row.metrics, "reward": 0.0 if row.reward is None else row.reward})
    reward = metrics.pop("reward")
    return replace(row, reward=None if row.reward is None else reward, metrics=metrics)


def _check_segments(row: Trajectory, max_length: int, vocabulary: int) -> None:
    ids = np.concatenate([segment.token_ids for segment in row.trained_segments])
    if len(ids) > max_length:
        raise ValueError(f"a trajectory has {len(ids)} tokens, and rollout.max_model_len allows {max_length}")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"a trajectory has token {ids.min() if ids.min() < 0 else ids.max()}, unknown to the model")
    if not all(np.isfinite(x).all() for part in row.segments for x in (part.rewards, part.logprobs) if x is not None):
        raise ValueError("a token's log-probability, or the reward of a turn or a token, is not a finite number")
