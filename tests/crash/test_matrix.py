"""hwrl's checkpoints keep their promises at every point of the matrix; known bad orders do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.comm.store import serve_store, store_address
from hwrl.testing.processes import run_processes
from tests.crash.disk import KINDS, Kind, why_unavailable
from tests.crash.matrix import Matrix, Point
from tests.crash.references import DeletesEarly, Reference, ReferenceSession, WritesInPlace
from tests.crash.sweep import STAGES, Outcome, Plan, prepare_process, run_points, stage_of, sweep, two_nodes

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


ALL: list[Kind] = ["kill", "full", "eio"]


@pytest.mark.parametrize(
    ("order", "kinds", "at_least"),
    [
        (DeletesEarly, ["kill"], 16),
        (WritesInPlace, ["full", "eio"], 13),
        pytest.param(DeletesEarly, ALL, 16, marks=pytest.mark.extended),
        pytest.param(WritesInPlace, ALL, 13, marks=pytest.mark.extended),
    ],
)
def test_the_matrix_finds_orders_that_lose_or_mix(
    tmp_path: Path, order: type[ReferenceSession], kinds: list[Kind], at_least: int
) -> None:
    outcome = run_processes(_sweep_reference, 1, tmp_path, order, kinds, timeout_s=2900)[0]
    for kind in kinds:
        assert sum(f":{kind}@" in complaint for complaint in outcome.broken) >= at_least


@pytest.mark.long(40)
@pytest.mark.parametrize(
    ("plan", "subjects"),
    [(Plan(24, few=True), 5), pytest.param(Plan(160), 17, marks=pytest.mark.extended)],
    ids=["few", "all"],
)
def test_no_fault_breaks_a_promise(plan: Plan, subjects: int) -> None:
    outcome = sweep(plan, timeout_s=5900)
    assert not outcome.broken, "\n".join(outcome.broken)
    assert outcome.points.total() == plan.count and len(outcome.points) == subjects
    assert outcome.faults.keys() >= set(KINDS) and outcome.stages.keys() == STAGES.keys()


def _kill_in_commit(rank: int, work: Path, store: str) -> Outcome:
    prepare_process()
    matrix = Matrix([two_nodes(store)], work)
    points = [point for point in matrix.every_point(kinds=["kill"]) if stage_of(matrix, point) == "commit"]
    return run_points(matrix, points, workers=4)


def test_killed_between_the_commits_of_two_nodes_both_resume_the_same_step(tmp_path: Path) -> None:
    """Before the rename, and before its sync; one node, or both."""
    store = serve_store()
    outcome = run_processes(_kill_in_commit, 1, tmp_path, store_address(store), timeout_s=2900)[0]
    assert not outcome.broken, "\n".join(outcome.broken)
    assert outcome.points.total() == 8
