"""Megatron-core on NPUs: an adaptor patches it, and must be imported before it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hwrl.errors import EngineError

_ADAPTORS = {"mindspeed": "mindspeed.megatron_adaptor", "megatron_adaptor": "megatron_adaptor"}
"""By package, the module whose import patches Megatron: MindSpeed's, and that of its successor."""


def prepare() -> None:
    """Import the adaptor that is installed; Megatron must not have been imported yet. Raises EngineError if none is."""
    installed = [package for package in _ADAPTORS if importlib.util.find_spec(package) is not None]
    if not installed:
        raise EngineError(
            "cannot prepare Megatron-core for NPUs",
            why=f"none of {', '.join(_ADAPTORS)} is installed",
            fix="install the branch of MindSpeed that belongs to your Megatron-core, for example core_r0.16.0",
        )
    with _hidden_command_line():
        importlib.import_module(_ADAPTORS[installed[0]])


@contextmanager
def _hidden_command_line() -> Iterator[None]:
    """Hide the arguments of this program, which the adaptor would parse as Megatron's."""
    arguments = sys.argv
    sys.argv = arguments[:1]
    try:
        yield
    finally:
        sys.argv = arguments
