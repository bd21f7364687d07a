"""No prompt is skipped and none is trained twice, however often a run is killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.testing.processes import run_processes
from tests.crash.cycles import BATCH, STEPS_PER_CYCLE, Tally, run_cycles
from tests.crash.disk import why_unavailable
from tests.crash.sweep import prepare_process


def _cycle(rank: int, home: Path, cycles: int, seed: int) -> Tally:
    prepare_process()
    return run_cycles(home, cycles=cycles, seed=seed)


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_every_prompt_is_trained_once_though_the_run_is_killed_again_and_again(tmp_path: Path) -> None:
    tally = run_processes(_cycle, 1, tmp_path, 8, 0, timeout_s=1700)[0]
    assert tally.kills == 8
    assert (tally.trained, tally.skipped, tally.twice) == (8 * STEPS_PER_CYCLE * BATCH, [], [])
