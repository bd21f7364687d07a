"""The backend in docs/backends.md, installed as its own package, is found, chosen, and conforms; its tests pass."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Sequence
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs" / "backends.md"
HWRL = str(Path(sysconfig.get_path("scripts")) / "hwrl")


def printed(language: str, *, heading: str = "Add a backend") -> str:
    """Return the first code block of ``language`` in the section with this heading."""
    section = DOCS.read_text().partition(f"## {heading}")[2]
    found = re.search(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found.group(1)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder that holds the package just as an installer leaves it."""
    package, metadata = tmp_path / "hwrl_acme", tmp_path / "hwrl_acme-0.1.dist-info"
    package.mkdir()
    metadata.mkdir()
    (package / "__init__.py").write_text(printed("python"))
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hwrl-acme\nVersion: 0.1\n")
    groups = tomllib.loads(printed("toml"))["project"]["entry-points"]
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in groups[group].items()) for group in groups
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return tmp_path


def run(site: Path, *words: str, command: Sequence[str] = (HWRL,), **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name != "HWRL_BACKEND"}
    env = clean | {"PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"} | env
    words = (*command, *words)
    return subprocess.run(words, env=env, cwd=site, text=True, capture_output=True, timeout=1500, check=False)


def test_it_is_found_and_chosen_by_detection(site: Path) -> None:
    report = json.loads(run(site, "doctor", "--json", ACME_SIMULATOR="1").stdout)
    assert report["ok"], report
    assert report["chosen"] == "acme"


def test_its_no_comes_with_its_reason(site: Path) -> None:
    ended = run(site, "doctor", HWRL_BACKEND="acme")
    assert ended.returncode == 1
    assert "ACME_SIMULATOR is not set" in ended.stdout


@pytest.mark.extended  # ci/wheel always runs it; on the tree the kit runs on the reference backend
def test_it_conforms(site: Path) -> None:
    ended = run(site, "conformance", "acme", "--level", "collectives", ACME_SIMULATOR="1")
    assert ended.returncode == 0, ended.stdout


@pytest.mark.extended  # like the test before
def test_its_own_tests_pass(site: Path) -> None:
    (site / "test_acme.py").write_text(printed("python", heading="Prove it"))
    pytest_here = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-v")
    ended = run(site, "test_acme.py", command=pytest_here, ACME_SIMULATOR="1")
    assert ended.returncode == 0, ended.stdout
    for passed in ("TestDevice", "TestDeviceMemory"):
        assert re.search(rf"::{passed}::\w+ PASSED", ended.stdout), ended.stdout


def test_it_is_as_short_as_the_page_says() -> None:
    assert len(printed("python").splitlines()) <= 40
