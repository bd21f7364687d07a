"""The checks of all trackers: their library is installed, and the user's options are known."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from typing import Any

from hwrl.errors import ConfigError, EngineError, did_you_mean


def check_tracker(
    name: str, options: Mapping[str, Any], *, known: Collection[str], package: str = "", module: str = ""
) -> None:
    """Raise EngineError if the library ``name`` is not installed, ConfigError for an option that is not ``known``.

    ``module`` is the library's module, and ``package`` its name for pip; both are ``name`` by default. Imports nothing
    but the parent packages of ``module``.
    """
    if not _is_installed(module or name):
        raise EngineError(
            f"report.trackers={name} cannot be used",
            why=f"{module or name} is not installed",
            fix=f"pip install {package or name}, or leave it out of report.trackers",
        )
    for option in options:
        if option not in known:
            raise ConfigError(
                f"report.tracker_options.{name}.{option} is not possible",
                why=f"the options are {', '.join(sorted(known))}" if known else "it has no options",
                fix=did_you_mean(option, known, otherwise="remove it"),
            )


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent package is missing
        return False
