"""hwrl's checkpoints keep their promises at every point of the matrix; known bad orders do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.testing.processes import run_processes
from tests.crash.disk import KINDS, Kind, why_unavailable
from tests.crash.matrix import Matrix, Point
from tests.crash.references import DeletesEarly, Reference, ReferenceSession, WritesInPlace
from tests.crash.sweep import Outcome, Plan, prepare_process, run_points, sweep

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def _sweep_reference(rank: int, work: Path, kind: type[ReferenceSession], faults: list[Kind]) -> Outcome:
    prepare_process()
    matrix = Matrix([Reference(kind)], work)
    outcome = run_points(matrix, list(matrix.every_point(kinds=faults)), workers=2)
    again = Point.parse(outcome.broken[0].partition(": ")[0])
    assert run_points(matrix, [again], workers=1).broken, (
        "the point that a report names is not broken when it is repeated"
    )
    return outcome


@pytest.mark.parametrize(("order", "at_least"), [(DeletesEarly, 16), (WritesInPlace, 13)])
def test_the_matrix_finds_orders_that_lose_or_mix(tmp_path: Path, order: type[ReferenceSession], at_least: int) -> None:
    kinds: list[Kind] = ["kill", "full", "eio"]
    outcome = run_processes(_sweep_reference, 1, tmp_path, order, kinds, timeout_s=2900)[0]
    for kind in kinds:
        assert sum(f":{kind}@" in complaint for complaint in outcome.broken) >= at_least


@pytest.mark.long(40)
@pytest.mark.parametrize("count", [40, pytest.param(160, marks=pytest.mark.extended)])
def test_no_single_fault_breaks_a_promise(count: int) -> None:
    outcome = sweep(Plan(count), timeout_s=5900)
    assert not outcome.broken, "\n".join(outcome.broken)
    assert outcome.points.total() == count
    assert outcome.faults.keys() >= set(KINDS), "each kind of fault"
    assert len(outcome.points) == 16, "each subject"
