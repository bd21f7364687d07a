"""Ten points of the sweep: each kind of fault and each victim at least once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.faults.points import POINTS, Point, choose
from tests.faults.sweep import describe
from tests.faults.trial import run_point

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
TEN = choose([point for point in POINTS if point.is_quick], 10, seed=5)


def labels(points: list[Point]) -> set[str]:
    return set().union(*(point.labels for point in points))


def test_there_are_sixty_points_and_more_and_no_two_are_alike() -> None:
    assert (
        len({point.name for point in POINTS}) == len({(p.injections, p.words, p.reward) for p in POINTS}) == len(POINTS)
    )
    assert len(POINTS) >= 60


def test_ten_points_meet_every_kind_and_every_victim() -> None:
    assert labels(POINTS) - labels(TEN) <= {"everything"}


def test_the_page_has_a_row_for_each_point() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## Results")[2]
    assert re.findall(r"^\| `([\w-]+)` \|", table, re.MULTILINE) == [point.name for point in POINTS]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("point", TEN, ids=lambda point: point.name)
def test_a_run_keeps_its_promises(point: Point) -> None:
    verdict = run_point(point)
    assert verdict.held, describe(point, verdict)
