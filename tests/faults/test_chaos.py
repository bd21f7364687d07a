"""Forty seconds and three minutes of the chaos run; ``make chaos MINUTES=30`` is longer."""

from __future__ import annotations

import pytest

from tests.faults.chaos import judge, short_run
from tests.support.host_network import why_unavailable

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")


@pytest.mark.extended  # each fault is in another test, too: a killed replica, a host that is cut off
@pytest.mark.long(100)
def test_forty_seconds_of_faults_lose_no_prompt() -> None:
    records = short_run(40.0, names=["kill a replica", "cut host1 off for 3 s"])
    assert len(records) == 2 and all(record.step_after_s is not None for record in records)


@pytest.mark.extended
@pytest.mark.long(400)
def test_three_minutes_of_faults_change_no_reward_and_lose_no_prompt() -> None:
    print(judge(180.0, seed=1))
