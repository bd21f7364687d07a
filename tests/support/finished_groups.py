"""Finished prompt groups, as a replica hands them to the ledger."""

from __future__ import annotations

import numpy as np

from hwrl.interfaces import PromptGroup, Response
from hwrl.rollout import PromptLease
from tests.support.single_turns import join_responses


def finished(
    lease: PromptLease,
    *,
    versions: list[int] | None = None,
    incarnation: int | None = None,
    rewards: tuple[float, ...] = (0.0,),
) -> PromptGroup:
    tokens = np.array(versions or [lease.version], dtype=np.int32)
    response = Response(tokens, tokens.astype(np.float32), tokens, truncated=False)
    return join_responses(
        [response] * len(rewards),
        sequence_number=lease.sequence_number,
        lease_id=lease.lease_id,
        incarnation=lease.incarnation if incarnation is None else incarnation,
        prompt_ids=np.array([1], dtype=np.int32),
        rewards=rewards,
        metrics={},
    )
