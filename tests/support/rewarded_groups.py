"""Prompt groups with rewards, for advantages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hwrl.interfaces import Ints, PromptGroup, Response
from tests.support.single_turns import join_responses


def ints(*numbers: int) -> Ints:
    return np.array(numbers, dtype=np.int32)


def response(length: int, *, truncated: bool = False) -> Response:
    return Response(np.full(length, 7, np.int32), np.zeros(length, np.float32), np.zeros(length, np.int32), truncated)


def group_of(rewards: Sequence[float], *, lengths: Sequence[int] = (), truncated: Sequence[bool] = ()) -> PromptGroup:
    lengths, truncated = lengths or [1] * len(rewards), truncated or [False] * len(rewards)
    return join_responses(
        [response(length, truncated=cut) for length, cut in zip(lengths, truncated, strict=True)],
        sequence_number=0,
        lease_id=0,
        incarnation=0,
        prompt_ids=ints(1, 2),
        rewards=rewards,
        metrics={},
    )
