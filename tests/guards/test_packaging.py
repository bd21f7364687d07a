"""The traps of one wheel with flat import names; each was met once."""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hwrl

REPO = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())
GROUPING = [REPO / "backends", REPO / "plugins"]
PACKAGES = sorted(
    folder for group in GROUPING for folder in group.glob("*") if folder.is_dir() and folder.name.isidentifier()
)
FLAT = [folder for folder in PACKAGES if folder.name != "__pycache__" and not (folder / "pyproject.toml").is_file()]
FOR_DEVELOPERS = [folder for folder in PACKAGES if (folder / "pyproject.toml").is_file()]
"""Packages with a distribution of their own, which is installed from a clone."""
ENTRY_POINTS: dict[str, dict[str, str]] = PROJECT["project"]["entry-points"]


def by_name(folder: Path) -> str:
    return folder.name


@pytest.mark.parametrize("folder", FLAT, ids=by_name)
def test_every_package_is_in_the_wheel(folder: Path) -> None:
    packages = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert str(folder.relative_to(REPO)) in packages, "add it to [tool.hatch.build.targets.wheel] packages"


@pytest.mark.parametrize("folder", FOR_DEVELOPERS, ids=by_name)
def test_a_package_for_developers_is_not_in_the_wheel(folder: Path) -> None:
    assert f'"{folder.relative_to(REPO)}"' not in (REPO / "pyproject.toml").read_text()
    own = tomllib.loads((folder / "pyproject.toml").read_text())
    assert folder.name in own["project"]["entry-points"]["hwrl.plugins"].values()
    assert (REPO / "Makefile").read_text().count(f"-e {folder.relative_to(REPO)}") == 1, "make installs it"


@pytest.mark.parametrize("folder", FLAT, ids=by_name)
def test_every_package_has_an_entry_point_and_is_discovered(folder: Path) -> None:
    declared = [
        (group, name)
        for group, entries in ENTRY_POINTS.items()
        for name, value in entries.items()
        if value.partition(":")[0].partition(".")[0] == folder.name
    ]
    assert declared, "add it to [project.entry-points]"
    for group, name in declared:
        assert importlib.metadata.entry_points(group=group, name=name), "reinstall: pip install -e ."


@pytest.mark.parametrize("folder", [REPO / "hwrl", *FLAT, *FOR_DEVELOPERS], ids=by_name)
def test_every_package_is_marked_as_typed(folder: Path) -> None:
    assert (folder / "py.typed").is_file()


@pytest.mark.parametrize("folder", [folder for folder in GROUPING if folder.is_dir()], ids=by_name)
def test_a_grouping_folder_is_no_package(folder: Path) -> None:
    assert not (folder / "__init__.py").exists(), "it would give a second copy of every module in it"


@pytest.mark.parametrize("statement", ["import backends.hwrl_cpu", "from plugins.hwrl_any import x"])
def test_the_linter_refuses_the_second_copy(statement: str) -> None:
    pytest.importorskip("ruff", reason="ruff comes with hwrl[dev]")
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--config",
        str(REPO / "pyproject.toml"),
        "--select",
        "TID251",
        "-",
    ]
    ended = subprocess.run(command, input=f"{statement}\n", text=True, capture_output=True, cwd=REPO, check=False)
    assert ended.returncode == 1
    assert "import the installed name" in ended.stdout


def test_core_and_backends_come_from_the_same_installation() -> None:
    files = [importlib.import_module(name).__file__ for name in ("hwrl", *map(by_name, FLAT))]
    in_tree = {Path(str(file)).is_relative_to(REPO) and "site-packages" not in str(file) for file in files}
    assert len(in_tree) == 1, f"a mixture of the tree and an installed wheel: {files}"


def test_a_child_process_imports_the_same_hwrl_from_the_root_of_the_tree() -> None:
    command = [sys.executable, "-c", "import hwrl; print(hwrl.__file__)"]
    printed = subprocess.run(command, text=True, capture_output=True, cwd=REPO, check=True).stdout
    assert printed.strip() == hwrl.__file__, "set PYTHONSAFEPATH where hwrl is not the tree's"


def test_no_entry_point_is_declared_by_two_distributions() -> None:
    for group in ENTRY_POINTS:
        names = [entry.name for entry in importlib.metadata.entry_points(group=group)]
        assert len(set(names)) == len(names)
