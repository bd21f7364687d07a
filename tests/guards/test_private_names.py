"""Tests use what is public: a test of a private name breaks when the name changes, though nothing is broken."""

from __future__ import annotations

import ast
import re

from tests.support import sources

FOREIGN = {
    "_attn_implementation": "transformers",
    "_flash_attn": "TRL",
    "_is_owned": "threading.RLock",
    "_parameters": "torch.nn.Module",
    "_schema": "torch.library",
    "_version": "torch.Tensor",
}
"""Private names of other libraries, which hwrl's code has, too."""

STRING_CALLS = ("setattr", "getattr", "delattr", "setitem", "delitem")
MOST_PRIVATE_NAMES, MOST_PRIVATE_USES = 17, 21
"""How many of hwrl's private names tests use, and how often. Lower them when a test no longer needs one."""


def private_names() -> set[str]:
    """Return the private names that hwrl, its backends and its plugins define."""
    found: set[str] = set()
    for node in (node for path in sources.SHIPPED for node in ast.walk(sources.tree(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if re.match("_[^_]", name)} - FOREIGN.keys()


def used_by(node: ast.AST) -> list[str]:
    """Return the names that ``node`` takes from an object or a module, written or as a string."""
    if isinstance(node, ast.Attribute):
        return [] if ast.unparse(node.value) in ("self", "cls", "super()") else [node.attr]
    if isinstance(node, ast.ImportFrom):
        return [alias.name for alias in node.names] if str(node.module).startswith("hwrl") else []
    texts: list[ast.expr] = []
    if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in STRING_CALLS:
        texts = node.args
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
        texts = [node.slice]
    return [str(one.value).rpartition(".")[2] for one in texts if isinstance(one, ast.Constant)]


def test_tests_use_few_private_names() -> None:
    private, uses = private_names(), []
    for path in sorted((sources.REPO / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            places = (
                (name, f"{path.relative_to(sources.REPO)}:{getattr(node, 'lineno', 0)}") for name in used_by(node)
            )
            uses += [(name, place) for name, place in places if name in private]
    names = {name for name, _ in uses}
    told = "\n".join(f"{name} at {place}" for name, place in sorted(uses))
    assert len(names) <= MOST_PRIVATE_NAMES and len(uses) <= MOST_PRIVATE_USES, (
        f"tests use {len(names)} private names of hwrl {len(uses)} times; {MOST_PRIVATE_NAMES} and {MOST_PRIVATE_USES} "
        "are allowed. Test through what is public: make a tuning constant a keyword-only parameter with the same "
        f"default, read a public property or method, or construct the inner class itself:\n{told}"
    )
