"""No shipped code shows the key of a store or of an endpoint: in a log, an error or a repr."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.sources import SHIPPED, place, tree

_SECRETS = {"api_key", "secret", "store_address", "_store_address"}
"""Names of texts that open something."""
_STORES = {"init_info.store", "offer.store", "update_info.store", "update_info.offer", "offer"}
"""Expressions with the address of a store, or of an object that has one."""
_SHOWING = {"critical", "debug", "error", "exception", "info", "log", "print", "warn", "warning"}


def _fields_with_a_repr(module: ast.Module) -> Iterator[ast.AnnAssign]:
    """Yield each field of a dataclass that holds a secret and is in the repr."""
    for made in ast.walk(module):
        if isinstance(made, ast.ClassDef) and any("dataclass" in ast.unparse(each) for each in made.decorator_list):
            for field in made.body:
                if isinstance(field, ast.AnnAssign) and _is_secret_field(field) and "repr=False" not in _value(field):
                    yield field


def _is_secret_field(field: ast.AnnAssign) -> bool:
    return ast.unparse(field.target) in _SECRETS | {"store"} and "str" in ast.unparse(field.annotation)


def _value(field: ast.AnnAssign) -> str:
    return "" if field.value is None else ast.unparse(field.value)


def _shown(module: ast.Module) -> Iterator[ast.expr]:
    """Yield each expression that is logged, printed, put in an error, or formatted."""
    for node in ast.walk(module):
        if isinstance(node, ast.FormattedValue):
            yield node.value
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func).rpartition(".")[2]
            if name in _SHOWING or name.endswith("Error"):
                yield from node.args


def _is_secret(shown: ast.expr) -> bool:
    text = ast.unparse(shown)
    return text in _STORES or text.rpartition(".")[2] in _SECRETS or text.startswith("store_address(")


@pytest.mark.parametrize("source", [
    "@dataclass\nclass A:\n    store: str",
    "log.info('at %s', init_info.store)",
    "raise CommError(f'no store at {self._store_address}')",
    "print(store_address(store))",
])  # fmt: skip
def test_the_guard_sees_a_key_that_is_shown(source: str) -> None:
    module = ast.parse(source)
    assert [*_fields_with_a_repr(module), *filter(_is_secret, _shown(module))]


def test_no_key_is_shown() -> None:
    found = [place(path, line) for path in SHIPPED for line in _lines(path)]
    assert not found, "these lines show a key: log the place only, and give the field repr=False"


def _lines(path: Path) -> Iterator[int]:
    module = tree(path)
    yield from (field.lineno for field in _fields_with_a_repr(module))
    yield from (shown.lineno for shown in _shown(module) if _is_secret(shown))
