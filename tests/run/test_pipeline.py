"""The loop over the steps, with a stand-in for the processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hwrl.checkpoint import DurableFS
from hwrl.run.interrupts import Interrupts
from hwrl.run.processes.actors import BatchInfo
from hwrl.run.report import read_metrics
from tests.support.two_step_run import CHECKPOINT, StandInFleet, train


class BatchInTheLastMoment(StandInFleet):
    """No batch comes before a signal. Then the ledger has, or has not, given one before the run abandons it."""

    def __init__(self, home: Path, interrupts: Interrupts, *, given: bool) -> None:
        super().__init__(home, DurableFS())
        self._interrupts, self._given = interrupts, given

    def watch(self, references: list[Any]) -> list[Any]:
        self._interrupts.pending = True
        return []

    def value_of(self, info: str) -> BatchInfo | None:
        return super().value_of(info) if self._given else None


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_that_the_ledger_gave_before_the_run_was_interrupted_is_trained_on(tmp_path: Path, given: bool) -> None:
    interrupts = Interrupts()
    train(tmp_path, BatchInTheLastMoment(tmp_path, interrupts, given=given), interrupts)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1] * given
    assert (tmp_path / CHECKPOINT).exists() == given
