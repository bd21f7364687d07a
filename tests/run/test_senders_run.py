"""``hwrl train`` with two trainer ranks that both send the weights."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.support.train_run import LORA, Run

pytestmark = pytest.mark.long(40)


def test_a_run_whose_ranks_share_the_wire_sends_base_and_adapters(start: Callable[..., Run]) -> None:
    run = start("train.ranks=2", "weights.senders=2", "train.steps=3", "eval.every_steps=0", *LORA)
    assert run.wait() == 0, run.output()
    assert "2 of the trainer's ranks send them: weights.senders=2" in run.output()
    lines = run.metrics()
    assert [line["weights/version"] for line in lines] == [1, 2, 3]
    assert sum(line["sync/base_sent"] for line in lines) == 1
    assert all(line["sync/receivers"] >= 1 and line["sync/quarantined"] == 0 for line in lines)
