"""Three minutes of the chaos run; ``make chaos MINUTES=30`` is longer."""

from __future__ import annotations

import pytest

from tests.faults.chaos import judge
from tests.support.host_network import why_unavailable


@pytest.mark.extended
@pytest.mark.long(400)
@pytest.mark.timeout(900)
@pytest.mark.skipif(why_unavailable() is not None, reason=why_unavailable() or "")
def test_three_minutes_of_faults_change_no_reward_and_lose_no_prompt() -> None:
    print(judge(180.0, seed=1))
