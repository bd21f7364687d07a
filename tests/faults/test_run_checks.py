"""The checks find each broken promise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.faults.run_checks import FellError, check_accounts, name_end

WHOLE = ((0, 1), (2, 3), (4, 5))
ERROR = "hwrl: EngineError: the ledger died\n  why: it was killed\n  fix: resume=true continues\n"


def write_run(
    directory: Path, *, prompts: Sequence[Sequence[int]] = WHOLE, oldest: int = 0, versions: Sequence[int] = (1, 2, 3)
) -> Path:
    lines = [
        {"step": step, "time_s": 1.5, "staleness/min": oldest, "staleness/max": 1.0, "weights/version": version}
        for step, version in enumerate(versions, start=1)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [{"step": step, "sequence_numbers": numbers} for step, numbers in enumerate(prompts, start=1)]
    (directory / "trained_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return directory


def test_a_whole_run_holds(tmp_path: Path) -> None:
    check_accounts(write_run(tmp_path), steps=3, batch=2, max_staleness=1)


def test_a_run_that_filters_holds_and_each_number_is_settled_once(tmp_path: Path) -> None:
    directory = write_run(tmp_path, prompts=((0, 3), (2, 5), (6, 7)))
    path, kinds = directory / "trained_prompts.jsonl", ("sequence_numbers", "filtered", "failed")
    first, second, third = map(json.loads, path.read_text().splitlines())
    for filtered, complaint in (([1], None), ([1, 2], "twice: .2."), ([], "no prompts of a kind"), ([8], "lost: .1.")):
        rows = [first | {"failed": {"4": "no judge"}}, second | {"filtered": filtered}, third]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        with pytest.raises(FellError, match=complaint) if complaint else nullcontext():
            check_accounts(directory, steps=3, batch=2, max_staleness=1, settled=kinds)
    with pytest.raises(FellError, match="settled prompts of other kinds"):
        check_accounts(directory, steps=3, batch=2, max_staleness=1)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        ({"prompts": ((0, 1), (2, 3), (4,))}, "lost: .5."),
        ({"prompts": ((0, 1), (2, 3), (4, 5), (4, 5))}, "twice: .4, 5."),
        ({"prompts": ((0, 1), (2, 3), (4, 5, 6))}, "prompts"),
        ({"oldest": -19}, "ages of tokens from -19"),
        ({"versions": (1, 3, 2)}, "versions went back"),
        ({"versions": (1, 2)}, "a step"),
    ],
)
def test_a_broken_account_falls(tmp_path: Path, broken: dict[str, Any], complaint: str) -> None:
    with pytest.raises(FellError, match=complaint):
        check_accounts(write_run(tmp_path, **broken), steps=3, batch=2, max_staleness=1)


def test_ends_have_names() -> None:
    assert [name_end(status, "") for status in (0, 130, -9, -6)] == ["done", "interrupted", "killed", "status -6"]
    assert name_end(1, "building\n" + ERROR) == "error"


@pytest.mark.parametrize(
    ("status", "output"),
    [(1, "goal missed"), (1, "hwrl: EngineError: it died\n"), (0, "Traceback (most recent call last):\n"), (1, "")],
)
def test_an_output_that_helps_nobody_falls(status: int, output: str) -> None:
    with pytest.raises(FellError):
        name_end(status, output)


def test_rays_report_of_a_lost_raylet_is_no_traceback_of_the_run() -> None:
    report = "\x1b[33m(raylet)\x1b[0m Raylet is terminated.\n    *** StackTrace Information ***\n    raylet(+0xff)\n"
    assert name_end(130, f"step 1\n{report}interrupted\n") == "interrupted"
    with pytest.raises(FellError, match="a raw traceback"):
        name_end(130, f"{report}*** StackTrace Information ***\n")


def test_an_ended_run_may_miss_its_last_prompts_only(tmp_path: Path) -> None:
    lost = write_run(tmp_path, prompts=((0, 1), (3, 4), (5, 6)))
    with pytest.raises(FellError, match=r"lost: .2."):
        check_accounts(lost, steps=3, batch=2, max_staleness=1, under_way=4)
    ended = write_run(tmp_path, prompts=((0, 1), (2, 3), (5, 6)))
    check_accounts(ended, steps=3, batch=2, max_staleness=1, under_way=4)
