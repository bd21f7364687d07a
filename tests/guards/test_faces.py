"""Each package of hwrl has a face, its ``__init__.py`` with an explicit ``__all__``; backends and plugins use faces."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from tests.support.sources import BACKENDS, FACES, PLUGINS, REPO, imported_modules, public_names


def inner_imports(paths: list[Path]) -> set[str]:
    """Return ``file: module`` for each import of a module inside one of hwrl's packages."""
    return {
        f"{path.relative_to(REPO)}: {module}"
        for path in paths
        for module in imported_modules(path)
        if module.startswith("hwrl.") and module.count(".") > 1
    }


def test_every_package_is_listed() -> None:
    packages = {path.parent.name for path in (REPO / "hwrl").glob("*/__init__.py")}
    assert packages - {"cli"} == set(FACES), "list the new package here"


@pytest.mark.parametrize("package", sorted(FACES))
def test_every_public_name_resolves(package: str) -> None:
    names = public_names(package)
    assert names, f"give hwrl/{package}/__init__.py an __all__ of strings; ruff keeps it sorted (RUF022)"
    module = importlib.import_module(f"hwrl.{package}")
    assert [name for name in names if not hasattr(module, name)] == []


def test_backends_import_from_faces_only() -> None:
    assert inner_imports(BACKENDS) == set()


def test_plugins_import_from_faces_only() -> None:
    assert inner_imports(PLUGINS) == set()
