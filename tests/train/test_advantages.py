"""Advantages against tables worked out by hand: per row, per token, over samples, whitened over a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from hwrl.errors import DataError
from hwrl.interfaces import PromptGroup, Segment, Trajectory
from hwrl.train import Overlong
from hwrl.train.advantages import group_advantages
from hwrl.train.batches import collate, row_weights
from hwrl.train.choices import AggregationMode
from tests.support.rewarded_groups import group_of, ints, response


def of_samples(samples: list[list[Trajectory]], rewards: Sequence[float]) -> PromptGroup:
    return PromptGroup.of_samples(samples, sequence_number=0, lease_id=0, incarnation=0, rewards=rewards, metrics={})


def turns(*rewards: float) -> Trajectory:
    """Return a trajectory of turns of two tokens, each with its reward, and a tool's token between them."""
    segments: list[Segment] = [Segment(ints(1, 2))]
    for reward in rewards:
        segments += [Segment.of_response(response(2), reward=reward), Segment(ints(9))]
    return Trajectory(segments)


def test_grpo_normalises_within_each_group() -> None:
    advantages = group_advantages([group_of([1.0, 0.0]), group_of([5.0, 5.0])], estimator="grpo")
    assert advantages.tolist() == pytest.approx([1.0, -1.0, 0.0, 0.0], abs=1e-5)


def test_dr_grpo_only_centres_and_rloo_leaves_the_response_out() -> None:
    groups = [group_of([3.0, 0.0, 0.0])]
    assert group_advantages(groups, estimator="dr_grpo").tolist() == pytest.approx([2.0, -1.0, -1.0])
    assert group_advantages(groups, estimator="rloo").tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_reinforce_plus_plus_whitens_rewards_over_all_tokens() -> None:
    """Rewards 3, 1 | 0 on 1, 2, 1 tokens: mean 5 / 4, unbiased variance (1.75² + 2 · 0.25² + 1.25²) / 3."""
    groups = [group_of([3.0, 1.0], lengths=[1, 2]), group_of([0.0])]
    deviation = np.sqrt((1.75**2 + 2 * 0.25**2 + 1.25**2) / 3)
    advantages = group_advantages(groups, estimator="reinforce_plus_plus")
    assert advantages.tolist() == pytest.approx([1.75 / deviation, -0.25 / deviation, -1.25 / deviation])


def test_its_baseline_form_centres_each_group_first() -> None:
    """Centred 1, -1 | 0 on 1, 2, 1 tokens: mean -1 / 4, unbiased variance (1.25² + 2 · 0.75² + 0.25²) / 3."""
    groups = [group_of([3.0, 1.0], lengths=[1, 2]), group_of([0.0])]
    deviation = np.sqrt((1.25**2 + 2 * 0.75**2 + 0.25**2) / 3)
    advantages = group_advantages(groups, estimator="reinforce_plus_plus_baseline")
    assert advantages.tolist() == pytest.approx([1.25 / deviation, -0.75 / deviation, 0.25 / deviation])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_a_batch_without_variance_teaches_nothing(estimator: str) -> None:
    assert group_advantages([group_of([2.0, 2.0])] * 2, estimator=estimator).abs().max() < 1e-6
    assert group_advantages([group_of([2.0])], estimator=estimator).tolist() == [0.0]


def test_a_sample_of_several_rows_counts_once_in_the_baseline() -> None:
    """Samples with rewards (2, 4) and (0): their means are 3 and 0, and the baseline 1.5, not the mean of rows, 2."""
    group = of_samples([[turns(0.0), turns(0.0)], [turns(0.0)]], [2.0, 4.0, 0.0])
    group = replace(group, token_rewards=None)
    assert group_advantages([group], estimator="dr_grpo").tolist() == [0.5, 2.5, -1.5]
    assert group_advantages([group], estimator="rloo").tolist() == [2.0, 4.0, -3.0], "the baseline of others' samples"
    grpo = group_advantages([group], estimator="grpo").tolist()
    assert grpo == pytest.approx([0.5 / 1.5, 2.5 / 1.5, -1.0], abs=1e-5)


def test_rewards_of_turns_make_advantages_of_tokens() -> None:
    """Row 1 earns 1, then 2, then its own 0.5 (3.5); row 2 earns 0.5. The baseline is 2."""
    group = of_samples([[turns(1.0, 2.0)], [turns(0.0)]], [0.5, 0.5])
    advantages = group_advantages([group], estimator="dr_grpo")
    assert advantages.tolist() == [1.5, 1.5, 0.5, 0.5, 0.5, -1.5, -1.5], "the tool's token is no policy's"
    batch = collate([group], advantages=advantages)
    assert batch.advantages.tolist() == [[0, 0, 1.5, 1.5, 0.5, 0.5, 0.5], [0, 0, -1.5, -1.5, 0, 0, 0]]
    assert batch.mask.tolist()[0] == [False, False, True, True, False, True, True]
    alone = collate([group], advantages=advantages, rows=[1])
    assert alone.advantages.tolist() == [[0, 0, -1.5, -1.5]]


def test_rewards_of_tokens_in_one_group_make_all_groups_advantages_per_token() -> None:
    groups = [group_of([1.0, 0.0], lengths=[2, 1]), of_samples([[turns(1.0)], [turns(0.0)]], [0.0, 0.0])]
    advantages = group_advantages(groups, estimator="dr_grpo")
    assert advantages.tolist() == [0.5, 0.5, -0.5, 0.5, 0.5, -0.5, -0.5]
    assert collate(groups, advantages=advantages).advantages[:, 2:4].tolist() == [
        [0.5, 0.5],
        [-0.5, 0.0],
        [0.5, 0.5],
        [-0.5, -0.5],
    ]


def test_samples_that_earn_the_same_by_other_turns_teach_nothing_with_grpo() -> None:
    """0.1 + 0.2 and 0.3 are other float32 sums: a division by their tiny deviation would make -300,000 of the rest."""
    for rewards in ((0.1, 0.2, 0.0), (0.3, 0.0, 0.0)), ((1.0, 0.0), (0.0, 1.0)), ((0.0,), (0.0,)):
        group = of_samples([[turns(*sample)] for sample in rewards], [0.0, 0.0])
        assert not group_advantages([group], estimator="grpo").any()


def test_whitening_leaves_out_the_tokens_of_others() -> None:
    group = of_samples([[turns(1.0, 2.0)], [turns(0.0)]], [0.0, 0.0])
    advantages = group_advantages([group], estimator="reinforce_plus_plus")[torch.from_numpy(group.loss_mask)]
    assert advantages.mean().item() == pytest.approx(0, abs=1e-6)
    assert advantages.var().item() == pytest.approx(1, abs=1e-5)


def test_a_users_function_gives_a_number_for_each_row_or_token() -> None:
    groups = [group_of([1.0, 0.0], lengths=[2, 1])]
    by_row = group_advantages(groups, estimator=lambda groups: np.array([1.0, -1.0]))
    assert (by_row.dtype, by_row.tolist()) == (torch.float32, [1.0, -1.0])
    assert group_advantages(groups, estimator=lambda groups: np.arange(3.0)).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda groups: np.zeros(5), r"have the shape \(5,\)\n  why: the groups have 2 rows and 3 tokens"),
        (lambda groups: np.array([1.0, np.nan]), "not all finite\n  why: number 1 is not"),
        (lambda groups: ["a", "b"], "cannot be computed\n  why: ValueError: could not convert string"),
    ],
)
def test_wrong_advantages_of_a_user_are_refused(
    result: Callable[[Sequence[PromptGroup]], np.ndarray], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        group_advantages([group_of([1.0, 0.0], lengths=[2, 1])], estimator=result)


# -- aggregation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "wanted"),
    [
        ("seq-mean-token-sum", (6 + 2) / 2),
        ("seq-mean-token-mean", (6 / 3 + 2 / 1) / 2),
        ("seq-mean-token-sum-norm", (6 + 2) / 2 / 8),
    ],
)
def test_the_weighted_mean_over_tokens_is_the_mode(mode: AggregationMode, wanted: float) -> None:
    """Rows of 3, 0 and 1 tokens, with sums of losses 6 and 2; another mini-batch of one row."""
    weights = row_weights([3, 0, 1, 5], [[0, 1, 2], [3]], mode=mode, constant=8)
    losses = {0: [1.0, 2.0, 3.0], 2: [2.0]}
    tokens = [weights[row] * loss for row, values in losses.items() for loss in values]
    assert sum(tokens) / len(tokens) == pytest.approx(wanted)
    assert weights[3] == pytest.approx({"seq-mean-token-sum": 5, "seq-mean-token-mean": 1}.get(mode, 5 / 8))


def test_the_mean_over_tokens_weighs_all_alike() -> None:
    assert row_weights([3, 1], [[0, 1]], mode="token-mean", constant=1.0).tolist() == [1.0, 1.0]


# -- long responses ---------------------------------------------------------------------------------------------------


def test_a_response_loses_reward_in_the_last_tokens_before_the_limit() -> None:
    """DAPO eq. 13 with a limit of 10 and a buffer of 4: nothing up to 6 tokens, then a quarter for each token."""
    lengths = [5, 6, 7, 9, 10]
    overlong = Overlong(buffer_tokens=4, max_tokens=10, penalty=2.0)
    (group,), metrics = overlong.apply([group_of([1.0] * 5, lengths=lengths)])
    assert group.rewards.tolist() == [1.0, 1.0, 0.5, -0.5, -1.0]
    assert metrics == {"reward/overlong_penalty": pytest.approx(0.8)}


def test_truncated_rows_leave_the_loss_but_stay_in_the_baseline() -> None:
    group = group_of([1.0, 0.0], lengths=[2, 3], truncated=[False, True])
    (masked,), _ = Overlong(masks_truncated=True).apply([group])
    assert masked.loss_mask.tolist() == [True, True, False, False, False]
    advantages = group_advantages([masked], estimator="dr_grpo")
    assert advantages.tolist() == [0.5, -0.5]
    assert collate([masked], advantages=advantages).lengths().tolist() == [4, 0], "it does not run"
