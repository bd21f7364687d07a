"""Undocumented is a failing build."""

from __future__ import annotations

import inspect
import re
import runpy
from pathlib import Path
from types import FunctionType

import pytest

from hwrl import errors
from hwrl.discovery import hookspecs
from hwrl.discovery.loading import MANDATORY_HOOKS
from hwrl.errors import HwrlError

DOCS = Path(__file__).parents[2] / "docs"
PAGES = list(DOCS.rglob("*.md"))
HOOKS = [function for name, function in vars(hookspecs).items() if name.startswith("hwrl_")]
ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, HwrlError)]


def sections(page: str) -> dict[str, str]:
    """Return the body under each second-level heading of a page."""
    parts = re.split(r"^## (.*)$", (DOCS / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_no_page_has_the_marks_of_a_merge() -> None:
    marked = [page.name for page in PAGES if re.search("^(<{7}|={7}|>{7})", page.read_text(), re.MULTILINE)]
    assert marked == []


def test_the_navigation_of_the_site_names_each_page_once() -> None:
    """Also where mkdocs, whose strict build would say it, is not installed."""
    navigation = (DOCS.parent / "ci/docs/mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert sorted(re.findall(r"[\w/-]+\.md", navigation)) == sorted(str(page.relative_to(DOCS)) for page in PAGES)


def test_a_warning_fails_the_build_of_the_site() -> None:
    (build,) = re.findall(r"mkdocs build .*", (DOCS.parent / "Makefile").read_text())
    assert "--strict" in build and "--quiet" not in build, "with --quiet mkdocs counts no warnings"


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
def test_every_hook_is_documented_with_its_signature(hook: FunctionType) -> None:
    body = sections("hooks.md")[hook.__name__]
    assert f"{hook.__name__}{inspect.signature(hook)}".replace("'", "") in body
    assert ("Mandatory." in body) == (hook.__name__ in MANDATORY_HOOKS)


def test_no_hook_is_documented_that_does_not_exist() -> None:
    assert set(sections("hooks.md")) == {hook.__name__ for hook in HOOKS}


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_is_documented_with_cause_and_remedy(kind: type[HwrlError]) -> None:
    body = sections("errors.md")[kind.code]
    assert f"`{kind.__name__}`" in body
    for word in ("Cause", "Remedy"):
        assert re.search(rf"^\*\*{word}\.\*\* \S.{{20,}}", body, re.MULTILINE), f"say the {word.lower()}"


def test_no_error_is_documented_that_does_not_exist() -> None:
    assert set(sections("errors.md")) == {kind.code for kind in ERRORS}


def test_the_tables_tell_every_key_and_capability_as_the_code_does() -> None:
    tables = runpy.run_path(str(DOCS.parent / "ci/docs/tables.py"))
    for write, page, right, wrong in (
        (tables["configuration"], "configuration.md", "| `seed` | `0` |", "| `seed` | `1` |"),
        (tables["backends"], "backends.md", "| `streams` | unsupported |", "| `streams` | supported |"),
    ):
        text = (DOCS / page).read_text(encoding="utf-8")
        assert write(text) == text, f"{page} is outdated: run ci/docs/tables.py"
        assert right in text and write(text.replace(right, wrong)) == text


def test_lines_of_prose_are_short() -> None:
    wrap = runpy.run_path(str(DOCS.parent / "ci/docs/wrap.py"))
    found = {path.name: lines for path in wrap["PAGES"] if (lines := wrap["long_lines"](path.read_text()))}
    assert not found, "run ci/docs/wrap.py"


def test_only_prose_is_wrapped() -> None:
    wrap = runpy.run_path(str(DOCS.parent / "ci/docs/wrap.py"))["wrap"]
    long = "word " * 30
    code, table, link = f"```\n{long}\n```\n", f"| {long} |\n", f"[{long}](page.md)\n"
    assert wrap(code + table + link) == code + table + link
    assert wrap(f"- {long}\n") == f"- {'word ' * 22}word\n  {'word ' * 6}word\n"
