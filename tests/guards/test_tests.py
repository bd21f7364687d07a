"""What tests share lies where a reader looks for it, and the tests run in a good order."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import speed
from tests.support.near import assert_near
from tests.support.order import long_ones_first

REPO = Path(__file__).parents[2]


def imported_by(path: Path) -> set[str]:
    """Return the modules that ``path`` imports, and the names that it imports from them, which may be modules, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_no_module_imports_a_test_module() -> None:
    """A change to one test must not break another: shared parts go to tests/support or to a conftest."""
    wrong = [
        f"{path.relative_to(REPO)} imports {name}"
        for path in sorted((REPO / "tests").rglob("*.py"))
        for name in sorted(imported_by(path))
        if name.startswith("tests.") and name.rpartition(".")[2].startswith("test_")
    ]
    assert not wrong, "move what they share to tests/support:\n" + "\n".join(wrong)


def test_the_scripts_name_tests_that_exist() -> None:
    """Also by a shell variable for the file or the folder: ``$engine::test_it``."""
    texts = {path.name: path.read_text() for path in (REPO / "ci").iterdir() if path.is_file()}
    texts["findings.md"] = (REPO / "docs/findings.md").read_text()
    ours = re.compile(r"(?<![\w/])tests/[\w/]+\.py\b")  # not those of another folder in the tree
    files = {(script, name) for script, text in texts.items() for name in ours.findall(text)}
    assert files
    assert [f"{script} names {name}" for script, name in sorted(files) if not (REPO / name).is_file()] == []
    ours_too = "".join(path.read_text() for path in (REPO / "tests").rglob("test_*.py"))
    tests = {(script, name) for script, text in texts.items() for name in re.findall(r"::(test_\w+)", text)}
    assert len(tests) > 5
    assert [f"{script} names {name}" for script, name in sorted(tests) if f"def {name}(" not in ours_too] == []


def limits_of(node: ast.expr) -> list[ast.expr]:
    """Return the limits of time in ``node``: what a call waits at most, or how long something may have taken."""
    if isinstance(node, ast.Compare) and ast.unparse(node.left).startswith("time.monotonic() -"):
        return node.comparators[-1:]
    if not isinstance(node, ast.Call):
        return []
    waits = isinstance(node.func, ast.Attribute) and node.func.attr in ("join", "result")
    return [*(node.args[:1] if waits else ()), *(one.value for one in node.keywords if one.arg == "timeout")]


def test_no_limit_measures_the_machine() -> None:
    """On a slow machine a test only takes longer. Below a second a limit is meant to run out."""
    wrong = [
        f"{path.relative_to(REPO)}:{node.lineno}: {ast.unparse(node)}"
        for path in sorted((REPO / "tests").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.expr)
        for limit in limits_of(node)
        if isinstance(limit, ast.Constant) and isinstance(limit.value, int | float) and 1 <= limit.value < 100
    ]
    assert not wrong, "wait for 100 s or more, or slow(seconds) of tests/support/speed.py:\n" + "\n".join(wrong)


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("4:cpu,cpuacct:/job", {"cpu/job/cpu.cfs_quota_us": "50000", "cpu/job/cpu.cfs_period_us": "100000"}, 0.5),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("0::/job/step", {"job/cpu.max": "50000 100000", "job/step/cpu.max": "max 100000"}, 0.5),
    ],
)
def test_the_share_of_a_container_is_the_number_of_its_cores(
    tmp_path: Path, group: str, files: dict[str, str], cores: float | None
) -> None:
    (tmp_path / "groups").write_text(f"7:memory:/elsewhere\n{group}\n")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert speed.cores(tmp_path / "groups", tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_what_is_near_is_rounding_only() -> None:
    wanted = torch.linspace(-1, 1, 4096)
    assert_near({"weight": wanted + 1e-7}, {"weight": wanted})
    one_step = wanted.clone()
    one_step[7] += 4e-5  # of Adam, where a gradient is a rounding error
    assert_near([one_step], [wanted])
    wrong = wanted.clone()
    wrong[7] += 0.1
    for other in (wrong, wanted / 2, wanted[:7]):
        with pytest.raises(AssertionError):
            assert_near({"weight": other}, {"weight": wanted})


class Item:
    """A test, as far as its order depends on it."""

    def __init__(self, name: str, seconds: float | None = None) -> None:
        self.name, self.marker = name, None if seconds is None else pytest.mark.long(seconds).mark

    def get_closest_marker(self, name: str) -> Any:
        return self.marker


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_long_tests_come_first_in_the_shares_of_all_workers_but_one(workers: int) -> None:
    items: list[Any] = [*(Item(f"short-{number}") for number in range(18)), Item("b", 20), Item("a", 30), Item("c", 10)]
    ordered = [item.name for item in long_ones_first(items, workers=workers)]
    assert sorted(ordered) == sorted(item.name for item in items)
    firsts = [ordered[21 * worker // workers] for worker in range(workers)]
    assert firsts[: max(1, workers - 1)] == ["a", "b", "c"][: max(1, workers - 1)]
    assert workers == 1 or firsts[-1].startswith("short")
    assert [name for name in ordered if name.startswith("short")] == [f"short-{number}" for number in range(18)]
