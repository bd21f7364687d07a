"""Megatron-core on NPUs: import the adaptor before it, because the adaptor patches it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hwrl.errors import EngineError

_ADAPTORS = {"mindspeed": "mindspeed.megatron_adaptor", "megatron_adaptor": "megatron_adaptor"}
"""The adaptor's module by package: MindSpeed, and its successor. Its import patches Megatron."""


def prepare() -> None:
    """Import the installed adaptor, before the first import of Megatron. Raises EngineError if none is installed."""
    installed = [package for package in _ADAPTORS if importlib.util.find_spec(package) is not None]
    if not installed:
        raise EngineError(
            "cannot prepare Megatron-core for NPUs",
            why=f"none of {', '.join(_ADAPTORS)} is installed",
            fix="install MindSpeed's branch for your Megatron-core, for example core_r0.16.0",
        )
    name = _ADAPTORS[installed[0]]
    with _hidden_command_line():
        try:
            importlib.import_module(name)
        except Exception as exc:  # it patches other packages, and fails in many ways if they do not fit
            raise EngineError(
                "cannot prepare Megatron-core for NPUs",
                why=f"import {name} raised {type(exc).__name__}: {exc}",
                fix="install MindSpeed's branch for your Megatron-core from its repository: PyPI has a placeholder",
            ) from exc


@contextmanager
def _hidden_command_line() -> Iterator[None]:
    """Hide this program's arguments: the adaptor would parse them as Megatron's."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments
