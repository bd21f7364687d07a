"""``make release``, as far as it needs no network: the notes, the version, and what a build would contain."""

from __future__ import annotations

import runpy
import stat
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
RELEASE = runpy.run_path(str(REPO / "ci/release.py"))
CHANGELOG = "# Changelog\n\n## 0.2.0 (unreleased)\n\n- Faster.\n\n## 0.1.0\n\n- First.\n"


def test_the_notes_are_the_changelogs_section() -> None:
    assert RELEASE["notes"](CHANGELOG, "0.2.0") == "# hwrl 0.2.0\n\n- Faster.\n"
    assert RELEASE["notes"](CHANGELOG, "0.1.0") == "# hwrl 0.1.0\n\n- First.\n"


@pytest.mark.parametrize("version", ["0.3.0", "0.2.00", "0.20.0"])
def test_a_version_without_a_section_is_no_release(version: str) -> None:
    with pytest.raises(SystemExit, match="no section"):
        RELEASE["notes"](CHANGELOG + "\n## 0.3.0\n", version)


def test_this_version_has_notes() -> None:
    assert RELEASE["notes"]((REPO / "CHANGELOG.md").read_text(), RELEASE["version"]()).count("\n- ") > 10


def test_pythons_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, status in (("python3.12", 0), ("python3.13", 127)):
        (tmp_path / name).write_text(f"#!/bin/sh\nexit {status}\n")
        (tmp_path / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert RELEASE["find_pythons"]() == {"3.11": None, "3.12": str(tmp_path / "python3.12"), "3.13": None}
