"""The prompt ledger: nothing lost, nothing trained twice, the staleness bound held without dropping."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hwrl.errors import ConfigError, DataError, EngineError
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
    assert ledger.counts()["rejected"] == 1
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
    assert ledger.counts()["returned"] == 1


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
    assert ledger.counts()["rejected"] == 2 and ledger.counts()["accepted"] == 0
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
    for lease, rewards in zip(leases, [EQUAL, EQUAL, EQUAL, DIFFERENT, EQUAL, EQUAL, EQUAL], strict=False):
        ledger.complete(finished(lease, rewards=rewards))
    with pytest.raises(DataError, match=r"last 4 groups taught nothing(.|\n)*the last are 1(.|\n)*easier prompts"):
        ledger.complete(finished(leases[7], rewards=EQUAL))


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
    assert resumed.state_of(0) == "trained" and resumed.counts()["filtered"] == 0


@pytest.mark.parametrize("batch", [4, 16])
def test_a_ledger_with_other_versions_refuses_a_checkpoint_and_stays_as_it_was(batch: int) -> None:
    state = ledger_of(batch=8).state_dict()
    other = ledger_of(batch=batch)
    leases = other.lease(batch, replica="a", now_s=0)
    with pytest.raises(ConfigError, match=rf"cannot resume with {batch} prompts for each weight version(.|\n)*has 8"):
        other.load_state_dict(state, incarnation=1)
    assert other.incarnation == 0 and other.complete(finished(leases[0]))


def test_progress_keeps_a_lease_and_silence_ends_it() -> None:
    ledger = ledger_of(timeout_s=10)
    first, second = ledger.lease(2, replica="a", now_s=0)
    ledger.renew([first], now_s=9)
    assert ledger.expire(10.0) == ["a"] and ledger.counts()["returned"] == 1
    ledger.renew([second], now_s=18)
    assert ledger.expire(18.9) == [] and ledger.expire(19.0) == ["a"], "an ended lease is not renewed"


class RandomRun:
    """A trainer and two replicas with one ledger. ``lines`` has the prompts of each step: trained, and untrained.

    A part of the finished groups, ``filtered``, teaches nothing. A part of the leases, ``failed``, ends in a failure.
    """

    def __init__(self, ledger: PromptLedger, *, batch: int, seed: int, filtered: float, failed: float) -> None:
        self.ledger, self.chance = ledger, random.Random(seed)
        self._batch, self._filtered, self._failed = batch, filtered, failed
        self.lines: list[tuple[list[int], UntrainedPrompts]] = []
        self._running: list[PromptLease] = []
        self._save()

    def replicas_act(self) -> None:
        """Lease prompts, finish one or fail with it, or lose a replica."""
        event = self.chance.random()
        if event < 0.46:
            self._running += self.ledger.lease(self.chance.randint(1, 6), replica=self.chance.choice("ab"), now_s=0)
        elif event < 0.96:
            self._finish_one()
        else:
            self.ledger.forget_replica(self.chance.choice("ab"))

    def save_or_go_back(self) -> None:
        """Save a checkpoint; or continue from the last one, as after the death of the trainer.

        A replica that was frozen meanwhile then hands in groups of the lost weights.
        """
        if self.chance.random() < 0.7:
            self._save()
            return
        step, state = self._saved
        del self.lines[step:]
        self.ledger.load_state_dict(state, incarnation=self.ledger.incarnation + 1)
        del self._running[8:]  # the others died with the trainer

    def train(self, *, version: int, staleness: int) -> None:
        """Do a step under ``version`` if the ledger gives a batch."""
        self.ledger.advance(version)
        groups = self.ledger.take(self._batch)
        if groups is None:
            return
        assert all(group.incarnation == self.ledger.incarnation for group in groups)
        assert all(version - group.newest_version >= 0 for group in groups)
        assert all(version - group.oldest_version <= staleness for group in groups)
        self.lines.append(([group.sequence_number for group in groups], self.ledger.take_untrained()))

    def _finish_one(self) -> None:
        if not self._running:
            return
        lease = self._running.pop(self.chance.randrange(len(self._running)))
        if self.chance.random() < self._failed:
            self.ledger.fail(lease, reason="no judge")
            return
        rewards = EQUAL if self.chance.random() < self._filtered else DIFFERENT
        self.ledger.complete(finished(lease, versions=[lease.version, self.ledger.version], rewards=rewards))

    def _save(self) -> None:
        self._saved = (len(self.lines), json.loads(json.dumps(self.ledger.state_dict())))


@settings(max_examples=200)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 5),
    steps_per_version=st.integers(1, 3),
    staleness=st.integers(0, 4),
    versions=st.integers(1, 12),
    filtered=st.sampled_from([0.0, 0.2, 0.7]),
    failed=st.sampled_from([0.0, 0.1]),
    lead=st.none() | st.integers(0, 12),
)
def test_under_any_order_of_events_each_prompt_is_settled_once_and_trained_within_the_bound(
    seed: int,
    batch: int,
    steps_per_version: int,
    staleness: int,
    versions: int,
    filtered: float,
    failed: float,
    lead: int | None,
) -> None:
    """Stragglers, lost replicas, filtered and failed prompts, and kill-and-resume from old checkpoints."""
    steps = versions * steps_per_version
    ledger = PromptLedger(
        groups_per_version=batch * steps_per_version,
        max_staleness=staleness,
        total_groups=steps * batch,
        lead_groups=lead,
        max_attempts=2,
        max_skipped_in_a_row=1000,
        teaches=has_variance,
    )
    ledger.advance(0)
    run = RandomRun(ledger, batch=batch, seed=seed, filtered=filtered, failed=failed)
    for _ in range(100_000):
        if len(run.lines) == steps:
            break
        event = run.chance.random()
        if event < 0.78:
            run.replicas_act()
        elif event < 0.81:
            run.save_or_go_back()
        else:
            run.train(version=len(run.lines) // steps_per_version, staleness=staleness)
    settled = {number: "trained" for numbers, _ in run.lines for number in numbers}
    settled |= {number: "filtered" for _, left in run.lines for number in left.filtered}
    settled |= {number: "failed" for _, left in run.lines for number in left.failed}
    assert sum(len(numbers) + len(left.filtered) + len(left.failed) for numbers, left in run.lines) == len(settled)
    assert sorted(settled) == list(range(ledger.state_dict()["next"]))
    assert settled == {number: ledger.state_of(number) for number in settled}
    assert [len(numbers) for numbers, _ in run.lines] == [batch] * steps


@pytest.mark.parametrize(("lead", "versions"), [(8, [{0}, {0}]), (4, [{0}, {0, 1}])])
def test_with_a_smaller_lead_younger_groups_overtake_a_straggler(lead: int, versions: list[set[int]]) -> None:
    """At the bound no place before its deadline is free. In both cases the straggler is trained within the bound."""
    ledger = PromptLedger(groups_per_version=4, max_staleness=2, total_groups=1000, lead_groups=lead)
    ledger.advance(0)
    straggler, *leases = ledger.lease(100, replica="a", now_s=0)
    batches = []
    while leases:
        for lease in leases:
            ledger.complete(finished(lease))
        if (batch := ledger.take(4)) is None:
            break
        batches.append({group.oldest_version for group in batch})
        ledger.advance(ledger.version + 1)
        leases = ledger.lease(100, replica="a", now_s=0)
    assert batches == versions
    assert ledger.complete(finished(straggler))
    oldest = ledger.take(4)
    assert oldest is not None and oldest[0].oldest_version == 0 and ledger.version == 2


def test_a_lead_below_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="lead_groups=-1 must be 0 or more"):
        PromptLedger(groups_per_version=4, max_staleness=1, total_groups=8, lead_groups=-1)


def test_a_smaller_lead_admits_less_and_a_larger_one_no_more_than_the_bound() -> None:
    ledger = ledger_of(batch=4, staleness=2)
    ledger.lead_groups = 3
    leases = ledger.lease(100, replica="a", now_s=0)
    assert len(leases) == 7
    for lease in leases[:4]:
        ledger.complete(finished(lease))
    assert ledger.take(4) is not None
    ledger.advance(1)
    assert ledger.capacity() == 4
    ledger.lead_groups = 0
    assert ledger.capacity() == 1
    ledger.lead_groups = 100
    assert ledger.capacity() == 9
