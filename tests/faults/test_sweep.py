"""Ten points of the sweep: each kind of fault and each victim at least once; and the points with filtered prompts.

``make test`` leaves out those of a kind and a victim that a test of whole runs in ``tests/run`` meets, too.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.faults.acts import MEMORY_GROUPS, Freeze, Limit, Send
from tests.faults.points import FILTER, JUDGED, POINTS, WORKFLOW, Point, at, choose
from tests.faults.sweep import describe
from tests.faults.trial import run_point

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TEN = choose([point for point in POINTS if point.is_quick and not point.filters], 10, seed=5)
FILTERING = [point for point in POINTS if point.filters]
OF_MACHINE = [point for point in POINTS if point.of_machine]
FINISHED = [point for point in POINTS if point.labels & {"finished-work", "second-run"}]
MET_ELSEWHERE = {
    "delete-config-kill-replica": "test_train_run.py: without its configuration the run replaces processes",
    "hup-trainer-stepping": "test_train_run.py: a frozen trainer goes back to its checkpoint",
    "term-driver-evaluating-finally": "test_agents_run.py: a signal ends the run cleanly",
    "int-ledger-judging": "test_train_run.py: without the ledger the run ends",
    "freeze-reward-workers-judging": "test_reward_workers.py: a call above its limit is killed",
    "pause-gcs-judging": "below, in one run with the next",
    "kill-env-agent-judging": "below",
    "few-files-raylet": "below",
    "reward-ends-its-process-once": "test_reward_workers.py: a process that ends is replaced",
    "edit-weights-kill-trainer": "test_progress_run.py: a changed input ends the run",
    **{point.name: "below: a replica and a trainer die, with the same account" for point in FILTERING},
}
"""Points that only ``make test-all`` runs, each with the test that holds its promise in ``make test``."""
AT_ONCE = [
    Point(
        "pause-gcs-few-files-raylet-kill-env-agent",
        frozenset({"done", "error"}),
        (
            at("judging", Freeze("gcs", 3.0), nth=JUDGED),
            at("stepping", Limit("raylet", "NOFILE", 30), Send("KILL", "env-agent"), nth=4),
        ),
    ),
    Point(
        "workflow-kill-replica-and-trainer",
        frozenset({"done"}),
        (at("calling", Send("KILL", "replica"), nth=8), at("stepping", Send("KILL", "trainer"), nth=4)),
        words=(*FILTER, *WORKFLOW),
        reward="teaches_some",
    ),
]
"""Faults of several points in one run, for ``make test``."""


def _case(point: Point) -> Any:
    extended = point.name in MET_ELSEWHERE or point.of_machine or point in FINISHED
    marks = [pytest.mark.extended] if extended else []
    if "out-of-memory" in point.labels:
        marks.append(
            pytest.mark.skipif(
                not os.access(MEMORY_GROUPS, os.W_OK), reason="memory control groups (version 1) are not permitted"
            )
        )
    return pytest.param(point, id=point.name, marks=marks)


def labels(points: list[Point]) -> set[str]:
    return set().union(*(point.labels for point in points))


def test_there_are_sixty_points_and_more_and_no_two_are_alike() -> None:
    assert (
        len({point.name for point in POINTS}) == len({(p.injections, p.words, p.reward) for p in POINTS}) == len(POINTS)
    )
    assert len(POINTS) >= 60


def test_ten_points_meet_every_kind_and_every_victim() -> None:
    assert labels([*TEN, *AT_ONCE, *FILTERING, *OF_MACHINE, *FINISHED]) >= labels(POINTS) - {"everything"}
    assert MET_ELSEWHERE.keys() <= {point.name for point in [*TEN, *AT_ONCE, *FILTERING]}


def test_the_page_has_each_point_with_its_permitted_ends() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("| permitted ends |")[2]
    rows = re.findall(r"^\| ([\w, ]+) \| (`.*`) \|$", table, re.MULTILINE)
    found = {name: {*ends.split(", ")} for ends, names in rows for name in re.findall(r"`([\w-]+)`", names)}
    assert found == {point.name: {*point.ends} for point in POINTS}


@pytest.mark.long(140)
@pytest.mark.parametrize("point", [_case(point) for point in [*TEN, *AT_ONCE, *FILTERING, *OF_MACHINE, *FINISHED]])
def test_a_run_keeps_its_promises(point: Point) -> None:
    verdict = run_point(point)
    assert verdict.held, describe(point, verdict)
