"""The pages' commands to install, and their paths, agree with the packages."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

REPO = Path(__file__).parents[2]
EXTRAS = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_every_extra_of_a_page_exists() -> None:
    pages = {path: path.read_text() for path in [*REPO.glob("docs/**/*.md"), REPO / "README.md"]}
    named = {
        extra
        for text in pages.values()
        for found in re.findall(r"pip install [^\n]*(?:hwrl|\.)\[([\w,]+)\]", text)
        for extra in found.split(",")
    }
    assert {"verl", "train", "agents"} <= named <= EXTRAS.keys()


def test_the_extra_for_verl_has_what_verl_imports_without_declaring_it() -> None:
    stack = (REPO / "ci/stacks/verl.txt").read_text()
    undeclared = stack.partition("not declared")[2].split("\n")[1:]
    assert {name for name in undeclared if name} <= set(EXTRAS["verl"]) and "verl==0.9.1" in EXTRAS["verl"]


def test_one_path_means_the_demo() -> None:
    named = [path.name for path in REPO.glob("docs/*.md") if "demo/seed-" in path.read_text()]
    assert named == ["index.md"], "the page that explains both paths"
