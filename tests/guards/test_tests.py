"""What tests share lies where a reader looks for it, and the tests run in a good order."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

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
    scripts = [path for path in (REPO / "ci").iterdir() if path.is_file()]
    named = {(path.name, name) for path in scripts for name in re.findall(r"\btests/[\w/]+\.py\b", path.read_text())}
    assert named
    assert [f"{script} names {name}" for script, name in sorted(named) if not (REPO / name).is_file()] == []


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
