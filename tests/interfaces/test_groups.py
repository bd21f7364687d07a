"""Trajectories, and the arrays of a prompt's group that are made of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hwrl.interfaces import Ints, PromptGroup, Response, Segment, Trajectory
from hwrl.train.batches import collate


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def response(*tokens: int, version: int = 3, truncated: bool = False) -> Response:
    ids = ints(*tokens)
    return Response(ids, -ids.astype(np.float32), np.full(len(ids), version, dtype=np.int32), truncated)


def two_turns(prompt: Ints, *, reward: float | None = None) -> Trajectory:
    """The policy, a tool, the policy, and a tool's answer that nobody read."""
    first = Segment.of_response(response(10, 11, version=3), reward=reward)
    last = Segment.of_response(response(14, version=5))
    return Trajectory((Segment(prompt), first, Segment(ints(12, 13)), last, Segment(ints(15))))


def group_of(*samples: list[Trajectory]) -> PromptGroup:
    rewards = [float(number) for sample in samples for number, _ in enumerate(sample)]
    return PromptGroup.of_samples(
        samples, sequence_number=4, lease_id=7, incarnation=1, rewards=rewards, metrics={"reward": 0.5}
    )


def test_a_group_of_single_turns_has_their_responses() -> None:
    rows = [Trajectory.single_turn(ints(1, 2), one) for one in (response(5, 6), response(7, truncated=True))]
    joined = group_of([rows[0]], [rows[1]])
    assert joined.token_ids.tolist() == [5, 6, 7] and joined.logprobs.tolist() == [-5, -6, -7]
    assert joined.prompt_ids.tolist() == [1, 2] and joined.lengths.tolist() == [2, 1]
    assert joined.versions.tolist() == [3, 3, 3] and joined.samples.tolist() == [0, 1]
    assert joined.loss_mask.all() and joined.truncated.tolist() == [False, True] and joined.token_rewards is None


def test_only_the_policys_tokens_are_trained() -> None:
    group = group_of([two_turns(ints(1, 2))])
    assert group.prompt_ids.tolist() == [1, 2] and group.token_ids.tolist() == [10, 11, 12, 13, 14]
    assert group.loss_mask.tolist() == [True, True, False, False, True]
    assert group.policy_lengths.tolist() == [3] and group.lengths.tolist() == [5]
    assert (group.oldest_version, group.newest_version) == (3, 5)
    batch = collate([group], advantages=torch.tensor([2.0]))
    assert batch.tokens.tolist() == [[1, 2, 10, 11, 12, 13, 14]]
    assert batch.mask.tolist() == [[False, False, True, True, False, False, True]]
    assert batch.behaviour_logprobs.tolist() == [[0, 0, -10, -11, 0, 0, -14]]


def test_an_empty_last_turn_is_left_out_with_what_came_before_it() -> None:
    row = Trajectory(
        (Segment(ints(1)), Segment.of_response(response(2)), Segment(ints(3)), Segment.of_response(response()))
    )
    group = group_of([row])
    assert group.token_ids.tolist() == [2] and group.loss_mask.tolist() == [True]


def test_several_rows_of_a_sample_and_different_prompts() -> None:
    group = group_of([two_turns(ints(1, 2)), two_turns(ints(9))], [two_turns(ints(1, 2))])
    assert group.samples.tolist() == [0, 0, 1] and group.rewards.tolist() == [0, 1, 0]
    assert not len(group.prompt_ids) and group.lengths.tolist() == [7, 6, 7]
    assert group.token_ids[:2].tolist() == [1, 2] and not group.loss_mask[:2].any()


def test_a_turns_reward_is_at_its_last_token() -> None:
    assert group_of([two_turns(ints(1))]).token_rewards is None
    rewards = group_of([two_turns(ints(1), reward=0.25)]).token_rewards
    assert rewards is not None and rewards.tolist() == [0, 0.25, 0, 0, 0]
    with pytest.raises(ValueError, match="a turn without tokens cannot have the reward"):
        Segment.of_response(response(), reward=0.25)


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(ValueError, match="a token of the policy"):
        Trajectory((Segment(ints(1)), Segment(ints(2))))
    for first in (Segment.of_response(response(1)), Segment(ints())):
        with pytest.raises(ValueError, match="begins with a prompt"):
            Trajectory((first, Segment.of_response(response(1))))
    with pytest.raises(ValueError, match="one element for each token"):
        Segment(ints(1, 2), logprobs=np.zeros(1, np.float32), versions=ints(0, 0))
    with pytest.raises(ValueError, match="only the policy"):
        Segment(ints(1), rewards=np.zeros(1, np.float32))
