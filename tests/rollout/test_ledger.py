"""The prompt ledger: nothing lost, nothing trained twice, the staleness bound held without dropping."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwrl.errors import DataError, EngineError
from hwrl.rollout import PromptLease, PromptLedger
from hwrl.rollout.ledger import UntrainedPrompts, has_variance
from tests.support.finished_groups import finished

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)
"""The rewards of a group without variance, and of one with it."""


def ledger_of(*, batch: int = 4, staleness: int = 1, total: int = 1000, timeout_s: float = 10.0) -> PromptLedger:
    ledger = PromptLedger(
        groups_per_version=batch, max_staleness=staleness, total_groups=total, group_timeout_s=timeout_s
    )
    ledger.advance(0)
    return ledger


def test_admission_stops_at_the_staleness_bound_and_opens_with_the_next_version() -> None:
    ledger = ledger_of(batch=4, staleness=1)
    first = ledger.lease(100, replica="a", now_s=0)
    assert len(first) == 8
    for lease in first[:4]:
        assert ledger.complete(finished(lease))
    assert ledger.take(4) is not None
    assert ledger.capacity() == 0
    ledger.advance(1)
    assert ledger.capacity() == 4


def test_threshold_zero_is_synchronous_every_group_is_of_the_current_version() -> None:
    ledger = ledger_of(batch=3, staleness=0)
    for version in range(5):
        ledger.advance(version)
        leases = ledger.lease(100, replica="a", now_s=0)
        assert len(leases) == 3
        assert ledger.take(3) is None
        for lease in leases:
            ledger.complete(finished(lease))
        batch = ledger.take(3)
        assert batch is not None
        assert [group.oldest_version for group in batch] == [version] * 3


def test_a_batch_waits_for_the_straggler_that_would_become_too_old() -> None:
    ledger = ledger_of(batch=2, staleness=1)
    straggler, *others = ledger.lease(4, replica="a", now_s=0)
    for lease in others:
        ledger.complete(finished(lease))
    assert ledger.take(2) is not None, "at version 0 nothing is due"
    ledger.advance(1)
    more = ledger.lease(2, replica="a", now_s=0)
    for lease in more:
        ledger.complete(finished(lease))
    assert ledger.take(2) is None, "the straggler of version 0 must go with version 1"
    ledger.complete(finished(straggler))
    batch = ledger.take(2)
    assert batch is not None
    assert straggler.sequence_number in [group.sequence_number for group in batch]


def test_a_group_with_a_token_older_than_its_lease_is_tried_again() -> None:
    ledger = ledger_of()
    ledger.advance(3)
    lease = ledger.lease(1, replica="a", now_s=0)[0]
    assert not ledger.complete(finished(lease, versions=[2, 3]))
    assert ledger.counts().rejected == 1
    assert ledger.lease(1, replica="a", now_s=0)[0].sequence_number == lease.sequence_number


def test_a_lost_replicas_prompts_go_to_others_and_its_late_answers_are_refused() -> None:
    ledger = ledger_of()
    lost = ledger.lease(2, replica="a", now_s=0)
    assert ledger.forget_replica("a") == 2
    again = ledger.lease(2, replica="b", now_s=0)
    assert [lease.sequence_number for lease in again] == [lease.sequence_number for lease in lost]
    assert not ledger.complete(finished(lost[0]))
    assert ledger.complete(finished(again[0]))


def test_a_lease_ends_at_its_deadline() -> None:
    ledger = ledger_of(timeout_s=10)
    late = ledger.lease(1, replica="a", now_s=0)[0]
    assert ledger.expire(9.9) == []
    assert ledger.expire(10.0) == ["a"]
    assert not ledger.complete(finished(late))
    assert ledger.counts().returned == 1


def test_a_prompt_that_keeps_failing_ends_the_run_with_its_reason() -> None:
    ledger = ledger_of()
    for _ in range(2):
        lease = ledger.lease(1, replica="a", now_s=0)[0]
        ledger.fail(lease, reason="division by zero")
    lease = ledger.lease(1, replica="a", now_s=0)[0]
    with pytest.raises(EngineError, match=r"failed 3 times(.|\n)*division by zero"):
        ledger.fail(lease, reason="division by zero")


def test_the_version_never_goes_back_without_a_resume() -> None:
    ledger = ledger_of()
    ledger.advance(2)
    with pytest.raises(EngineError, match="from 2 back to 1"):
        ledger.advance(1)


def test_nothing_is_given_out_before_the_weights_of_this_timeline_are_published() -> None:
    ledger = PromptLedger(groups_per_version=4, max_staleness=1, total_groups=100)
    assert ledger.lease(4, replica="a", now_s=0) == []
    ledger.advance(0)
    assert len(ledger.lease(4, replica="a", now_s=0)) == 4
    ledger.load_state_dict({"version": 3, "trained": 12, "next": 14, "owed": [12, 13]}, incarnation=1)
    assert ledger.lease(4, replica="a", now_s=0) == []
    ledger.advance(3)
    assert [lease.sequence_number for lease in ledger.lease(3, replica="a", now_s=0)] == [12, 13, 14]


def test_what_weights_of_a_lost_future_generated_is_refused_counted_and_generated_anew() -> None:
    """A replica was frozen at version 37 while the trainer went back to version 17, and wakes up."""
    ledger = ledger_of(batch=4, staleness=1)
    ledger.advance(37)
    lost = ledger.lease(1, replica="a", now_s=0)[0]
    ledger.load_state_dict({"version": 17, "trained": 68, "next": 70, "owed": [68, 69]}, incarnation=1)
    ledger.advance(17)
    lease = ledger.lease(1, replica="a", now_s=0)[0]
    assert (lease.sequence_number, lease.version, lease.incarnation) == (68, 17, 1)
    assert not ledger.complete(finished(lost, versions=[37])), "its lease is over"
    assert not ledger.complete(finished(lease, versions=[17], incarnation=0)), "the same number, other weights"
    assert ledger.counts().rejected == 2 and ledger.counts().accepted == 0
    assert ledger.lease(1, replica="a", now_s=0)[0].sequence_number == 68


@pytest.mark.parametrize("versions", [[37], [17, 37], [-1], [16, 17]])
def test_tokens_of_versions_that_were_never_published_or_are_too_old_are_refused_and_end_in_an_error(
    versions: list[int],
) -> None:
    ledger = ledger_of()
    ledger.advance(17)
    for _ in range(2):
        assert not ledger.complete(finished(ledger.lease(1, replica="a", now_s=0)[0], versions=versions))
    with pytest.raises(EngineError, match=r"failed 3 times(.|\n)*only versions 17 to 18 are possible"):
        ledger.complete(finished(ledger.lease(1, replica="a", now_s=0)[0], versions=versions))


def test_a_version_that_the_trainer_has_just_published_is_taken() -> None:
    ledger = ledger_of()
    assert ledger.complete(finished(ledger.lease(1, replica="a", now_s=0)[0], versions=[0, 1]))


def filtering(*, batch: int = 2, staleness: int = 0, total: int = 4, in_a_row: int = 1000) -> PromptLedger:
    ledger = PromptLedger(
        groups_per_version=batch,
        max_staleness=staleness,
        total_groups=total,
        teaches=has_variance,
        max_filtered_in_a_row=in_a_row,
    )
    ledger.advance(0)
    return ledger


def test_a_filtered_group_is_replaced_at_once_and_the_stream_is_longer_by_it() -> None:
    ledger = filtering()
    first, second = ledger.lease(9, replica="a", now_s=0)
    assert ledger.complete(finished(first, rewards=EQUAL)) and ledger.complete(finished(second, rewards=DIFFERENT))
    (third,) = ledger.lease(9, replica="a", now_s=0)
    ledger.complete(finished(third, rewards=DIFFERENT))
    batch = ledger.take(2)
    assert batch is not None and [group.sequence_number for group in batch] == [1, 2]
    assert ledger.take_untrained() == UntrainedPrompts(filtered=[0])
    ledger.advance(1)
    assert [lease.sequence_number for lease in ledger.lease(9, replica="a", now_s=0)] == [3, 4]
    assert [ledger.state_of(number) for number in range(5)] == ["filtered", "trained", "trained", "owed", "owed"]
    with pytest.raises(ValueError, match="5 was never leased"):
        ledger.state_of(5)


def test_rewards_of_tokens_are_variance_too() -> None:
    (lease,) = ledger_of().lease(1, replica="a", now_s=0)
    group = finished(lease, rewards=EQUAL)
    assert not has_variance(group)
    assert not has_variance(replace(group, token_rewards=np.array([0.5, 0.5], dtype=np.float32)))
    assert has_variance(replace(group, token_rewards=np.array([0.5, 0.25], dtype=np.float32)))


def test_too_many_filtered_groups_in_a_row_end_the_run_and_a_kept_one_begins_the_count_anew() -> None:
    ledger = filtering(batch=20, total=20, in_a_row=3)
    leases = ledger.lease(20, replica="a", now_s=0)
    for lease, rewards in zip(leases, [EQUAL, EQUAL, DIFFERENT, EQUAL, EQUAL], strict=False):
        ledger.complete(finished(lease, rewards=rewards))
    with pytest.raises(DataError, match=r"last 3 groups taught nothing(.|\n)*the last are 1(.|\n)*easier prompts"):
        ledger.complete(finished(leases[5], rewards=EQUAL))


def test_a_skipped_prompt_has_failed_and_too_many_in_a_row_end_the_run() -> None:
    ledger = PromptLedger(groups_per_version=9, max_staleness=0, total_groups=9, max_attempts=1, max_skipped_in_a_row=2)
    ledger.advance(0)
    first, second, third, *others = ledger.lease(9, replica="a", now_s=0)
    ledger.fail(first, reason="no judge")
    ledger.complete(finished(second))
    ledger.fail(third, reason="no judge")
    ledger.fail(others[0], reason="no judge")
    assert ledger.take_untrained().failed == {0: "no judge", 2: "no judge", 3: "no judge"}
    with pytest.raises(EngineError, match=r"prompt 4 failed 1 times, after 2 other failed(.|\n)*no judge"):
        ledger.fail(others[1], reason="no judge")
    assert [ledger.state_of(number) for number in range(5)] == ["failed", "owed", "failed", "failed", "owed"]


def test_the_account_survives_a_checkpoint_as_json_and_an_earlier_one_has_nothing_filtered() -> None:
    ledger = filtering(batch=8, total=8)
    leases = ledger.lease(8, replica="a", now_s=0)
    for lease in leases[:5]:
        ledger.complete(finished(lease, rewards=EQUAL))
    state = json.loads(json.dumps(ledger.state_dict()))
    assert state["filtered"] == [[0, 4]] and state["owed"] == [5, 6, 7]
    resumed = filtering(batch=8, total=8)
    resumed.load_state_dict(state, incarnation=1)
    assert resumed.take_untrained().filtered == [0, 1, 2, 3, 4], "no line of a step has them yet"
    assert resumed.state_dict() == state | {"untrained": {"filtered": [], "failed": []}}
    resumed.load_state_dict({"version": 1, "trained": 8, "next": 9, "owed": [8]}, incarnation=2)
    assert resumed.state_of(0) == "trained" and resumed.counts().filtered == 0


def test_progress_keeps_a_lease_and_silence_ends_it() -> None:
    ledger = ledger_of(timeout_s=10)
    first, second = ledger.lease(2, replica="a", now_s=0)
    ledger.renew([first], now_s=9)
    assert ledger.expire(10.0) == ["a"] and ledger.counts().returned == 1
    ledger.renew([second], now_s=18)
    assert ledger.expire(18.9) == [] and ledger.expire(19.0) == ["a"], "an ended lease is not renewed"


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    steps_per_version=st.integers(1, 3),
    staleness=st.integers(0, 4),
    steps=st.integers(1, 12),
    filtered=st.sampled_from([0.0, 0.2, 0.7]),
    failed=st.sampled_from([0.0, 0.1]),
)
def test_under_any_order_of_events_each_prompt_is_settled_once_and_trained_within_the_bound(
    seed: int, batch: int, steps_per_version: int, staleness: int, steps: int, filtered: float, failed: float
) -> None:
    """A random run with stragglers, lost replicas, filtered and failed prompts, and kill-and-resume.

    A replica that was frozen meanwhile hands in afterwards what it generated with the weights of a lost future.
    """
    chance = random.Random(seed)
    per_version = batch * steps_per_version
    steps = steps * steps_per_version
    ledger = PromptLedger(
        groups_per_version=per_version,
        max_staleness=staleness,
        total_groups=steps * batch,
        max_attempts=2,
        max_skipped_in_a_row=1000,
        teaches=has_variance,
    )
    ledger.advance(0)
    running: list[PromptLease] = []
    lines: list[tuple[list[int], UntrainedPrompts]] = []  # the lines of a report
    saved = (0, ledger.state_dict())
    for turn in range(100_000):
        step = len(lines)
        if step == steps:
            break
        event = chance.random()
        if event < 0.35:
            running += ledger.lease(chance.randint(1, 6), replica=chance.choice("ab"), now_s=turn)
        elif event < 0.75 and running:
            lease = running.pop(chance.randrange(len(running)))
            if chance.random() < failed:
                ledger.fail(lease, reason="no judge")
                continue
            rewards = EQUAL if chance.random() < filtered else DIFFERENT
            ledger.complete(finished(lease, versions=[lease.version, ledger.version], rewards=rewards))
        elif event < 0.78:
            ledger.forget_replica(chance.choice("ab"))
        elif event < 0.80:
            saved = (step, json.loads(json.dumps(ledger.state_dict())))
        elif event < 0.81:
            step, state = saved
            del lines[step:]
            ledger.load_state_dict(state, incarnation=ledger.incarnation + 1)
            del running[8:]  # the others died with the trainer
        else:
            ledger.advance(step // steps_per_version)
            groups = ledger.take(batch)
            if groups is not None:
                assert all(group.incarnation == ledger.incarnation for group in groups)
                assert all(ledger.version - group.newest_version >= 0 for group in groups)
                assert all(ledger.version - group.oldest_version <= staleness for group in groups)
                lines.append(([group.sequence_number for group in groups], ledger.take_untrained()))
    states = {number: "trained" for numbers, _ in lines for number in numbers}
    states |= {number: "filtered" for _, left in lines for number in left.filtered}
    states |= {number: "failed" for _, left in lines for number in left.failed}
    assert sum(len(numbers) + len(left.filtered) + len(left.failed) for numbers, left in lines) == len(states)
    assert sorted(states) == list(range(ledger.state_dict()["next"]))
    assert states == {number: ledger.state_of(number) for number in states}
    assert all(len(numbers) == batch for numbers, _ in lines)
