"""Imports: names of packages that are imported on first use, and large imports at less cost."""

from __future__ import annotations

import contextlib
import gc
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def lazy_names(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``, which has each name from a module inside.

    Nothing is kept in the package, so that it always shows the module's present value. ``__dir__`` also has the
    package's own names, among them the hooks of a plugin.

    >>> get, names = lazy_names("hwrl", {"HwrlError": "errors"})
    >>> get("HwrlError").__module__, {"HwrlError", "__name__"} <= set(names())
    ('hwrl.errors', True)
    """

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return get, lambda: [*vars(sys.modules[package]), *module_of]


def lazy_face(package: str) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` for the names that ``package`` imports for type checkers.

    Its ``__init__.py`` says each name once, as ``from package.module import name as name`` in ``if TYPE_CHECKING:``.
    """
    source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
    line = rf"^    from {re.escape(package)}\.(\S+) import (\w+) as \2$"
    module_of = {name: module for module, name in re.findall(line, source, re.MULTILINE)}
    return *lazy_names(package, module_of), [*module_of]


@contextlib.contextmanager
def large_imports() -> Iterator[None]:
    """Let Python's garbage collector rest within the block, and pass over all present objects later.

    An import of torch and transformers makes a million objects that stay, and a collector that visits them again and
    again takes a quarter of the import's time.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        if before:
            gc.enable()
