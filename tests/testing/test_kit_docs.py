"""docs/conformance.md and docs/engines.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hwrl
from hwrl.testing import CheckResult, Kind, KitReport, Level, Subject, conformance

DOCS = Path(__file__).parents[2] / "docs"
CONFORMANCE = (DOCS / "conformance.md").read_text()
NEW = (DOCS / "engines.md").read_text()


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)


def test_the_report_has_the_fields_of_the_page() -> None:
    check = CheckResult("Test::test", Level.COMPUTE, "passed", "", 0.0)
    report = KitReport(Subject(Kind.BACKEND, "cpu"), hwrl.get_backend(), Level.FULL, (check,))
    section = CONFORMANCE.partition("## Report")[2].partition("##")[0]
    documented = {name for row in re.findall(r"^\| (`.*?) \|", section, re.M) for name in re.findall(r"`(\w+)`", row)}
    assert documented == set(report.as_json())


def test_each_contract_is_on_the_page_with_its_level() -> None:
    rows = re.findall(r"^\| (`\w+Contract`.*?) \| (.*?) \|", CONFORMANCE, re.MULTILINE)
    shown: dict[str, str] = {}
    for names, levels in rows:
        contracts, each = re.findall(r"`(\w+)`", names), levels.split(", ")
        shown |= dict(zip(contracts, each * len(contracts) if len(each) == 1 else each, strict=False))
    contracts = [value for name, value in vars(conformance).items() if name.endswith("Contract")]
    assert shown == {contract.__name__: contract.level.value for contract in contracts}


def test_the_levels_are_those_of_the_code_in_order() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", CONFORMANCE.partition("## Levels")[2].partition("##")[0], re.MULTILINE)
    assert rows == [level.value for level in Level]


def test_the_python_of_the_pages_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    (contracts,), (link,) = blocks(CONFORMANCE, "python"), blocks(NEW, "python")
    names: dict[str, object] = {"__name__": "hwrl_documented"}
    exec(compile(contracts, "conformance.md", "exec"), names)
    assert issubclass(names["TestRollout"], conformance.RolloutContract)  # type: ignore[arg-type] # a class
    exec(compile(link, "engines.md", "exec"), names := {})
    for end in ("sender", "receiver"):
        names[end].close()  # type: ignore[attr-defined] # an end of a link
