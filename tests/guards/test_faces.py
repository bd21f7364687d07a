"""Each package of hwrl has a face, its ``__init__.py`` with an explicit ``__all__``; backends and plugins use faces."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import BACKENDS, FACES, PLUGINS, REPO, exported_names, public_names, tree

ROOTS = {"hwrl": REPO / "hwrl"} | {
    path.parent.name: path.parent for path in BACKENDS + PLUGINS if path.stem == "__init__"
}


def inner_imports(paths: list[Path]) -> set[str]:
    """Return ``file: module`` for each import of what its package does not export: of hwrl, a backend or a plugin."""
    return {
        f"{path.relative_to(REPO)}: {name}"
        for path in paths
        for name in foreign_imports(tree(path), own=path.relative_to(REPO).parts[1])
        if not is_exported(name)
    }


def foreign_imports(source: ast.Module, *, own: str) -> Iterator[str]:
    """Yield the names that ``source`` imports from the other packages of the repository, dotted."""
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in names if (root := name.partition(".")[0]) in ROOTS and root != own)


def is_exported(name: str) -> bool:
    """Return whether the dotted name is a package, one of hwrl's modules, or a name that these export."""
    module, _, attribute = name.rpartition(".")
    if not module or (module == "hwrl" and source_of(name)):
        return True
    source = source_of(module)
    if source is None or module.count(".") > (1 if module.startswith("hwrl.") else 0):
        return False
    return attribute in (exported_names(source) or [])


def source_of(module: str) -> Path | None:
    """Return the file of a package or module of the repository, or None."""
    root, *inside = module.split(".")
    place = ROOTS.get(root, REPO / root).joinpath(*inside)
    return next((path for path in (place / "__init__.py", place.with_suffix(".py")) if path.is_file()), None)


@pytest.mark.parametrize(
    "line, good",
    [
        ("from hwrl.weights import WeightSender", True),
        ("from hwrl.weights import RING_NBYTES", False),
        ("from hwrl.weights.sender import WeightSender", False),
        ("from hwrl.weights import sender", False),
        ("import hwrl.weights.sender", False),
        ("from hwrl.models import build_model", True),
        ("from hwrl.models import Path", False),
        ("from hwrl.models import _require_complete", False),
        ("from hwrl.errors import ConfigError", True),
        ("from hwrl import environ, checkpoint", True),
        ("from hwrl_vllm import VllmEngine", True),
        ("from hwrl_vllm.engine import VllmEngine", False),
        ("from hwrl_vllm import partial", False),
        ("from hwrl_own.inside import anything", True),
    ],
)
def test_the_search_for_inner_imports_finds_them(line: str, good: bool) -> None:
    assert all(map(is_exported, foreign_imports(ast.parse(line), own="hwrl_own"))) == good


@pytest.mark.parametrize("package", sorted({path.relative_to(REPO).parts[1] for path in PLUGINS}))
def test_every_plugin_says_what_it_exports(package: str) -> None:
    assert exported_names(ROOTS[package] / "__init__.py") is not None, "give it an __all__; an empty one is good"


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
