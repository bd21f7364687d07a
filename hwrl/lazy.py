"""Faces of packages whose names are imported on first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping


def lazy_names(package: str, module_of: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` for ``package``, which has each name from a module inside.

    Nothing is kept in the package, so that it always shows the module's present value.

    >>> get, names = lazy_names("hwrl", {"HwrlError": "errors"})
    >>> get("HwrlError").__module__, names()
    ('hwrl.errors', ['HwrlError'])
    """

    def get(name: str) -> object:
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f"{package}.{module_of[name]}"), name)

    return get, lambda: list(module_of)
