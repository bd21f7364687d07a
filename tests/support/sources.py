"""The source files of the repository, and what a program can read in them."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
CORE = sorted((REPO / "hwrl").rglob("*.py"))
BACKENDS = sorted((REPO / "backends").rglob("*.py"))
PLUGINS = sorted((REPO / "plugins").rglob("*.py"))
SHIPPED = CORE + BACKENDS + PLUGINS
ALL = SHIPPED + sorted((REPO / "tests").rglob("*.py"))

FACES = (
    "checkpoint",
    "comm",
    "discovery",
    "interfaces",
    "memory",
    "rollout",
    "run",
    "testing",
    "train",
    "weights",
)
"""The packages of hwrl that other code imports from."""


@cache
def tree(path: Path) -> ast.Module:
    """Return the syntax tree of ``path``."""
    return ast.parse(path.read_text())


def place(path: Path, line: int) -> str:
    """Return ``file:line`` for a message."""
    return f"{path.relative_to(REPO)}:{line}"


def imported_modules(path: Path) -> Iterator[str]:
    """Yield the modules that ``path`` imports, at any depth, at run time or for the type checker."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(path, node.lineno)}: import by the absolute name"
            yield str(node.module)


def imports(path: Path) -> Iterator[str]:
    """Yield the modules that ``path`` imports, and the names that it imports from them, dotted."""
    yield from imported_modules(path)
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def public_names(package: str) -> list[str]:
    """Return the ``__all__`` of a package of hwrl as it is written; an empty list if it is missing or computed."""
    return exported_names(REPO / "hwrl" / package / "__init__.py") or []


def exported_names(path: Path) -> list[str] | None:
    """Return the ``__all__`` of the file as it is written; None if it is computed.

    A face writes no ``__all__``: it exports the names that it imports ``as`` themselves, and its version. A single
    file exports the public names that it defines.
    """
    values: dict[str, ast.expr | None] = {}
    defined = []
    for node in tree(path).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            values[ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)] = node.value
        elif isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            defined.append(node.name)
    if path.stem != "__init__":
        return [name for name in [*values, *defined] if not name.startswith("_")]
    written = values.get("__all__")
    if "__all__" not in values:
        aliases = [one for node in ast.walk(tree(path)) if isinstance(node, ast.ImportFrom) for one in node.names]
        own = [name for name in values if name == "__version__"]
        return [*own, *(one.name for one in aliases if one.name == one.asname)] or None
    try:
        return None if written is None else list(ast.literal_eval(written))
    except ValueError:
        return None


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each comment with its line number."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def docstrings(path: Path) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, and the strings below constants and attributes."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text
        if isinstance(node, ast.Module | ast.ClassDef):
            for assignment, after in zip(node.body, node.body[1:], strict=False):
                if isinstance(assignment, ast.Assign | ast.AnnAssign) and (text := _string(after)):
                    yield text


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield each string with a space in it that is no docstring, with its line number."""
    bare = {id(node.value) for node in ast.walk(tree(path)) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree(path)) if isinstance(node, ast.Constant) and id(node) not in bare)
    for node in constants:
        if isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def _string(statement: ast.stmt) -> str:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""
