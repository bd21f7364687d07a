"""Plugins that are no backends: train engines and what else cuts across devices, chosen by name in the configuration.

They are entry points of the group ``hwrl.plugins``: the name is what a user writes, the value the plugin module. Only
the plugin that is asked for is imported.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from hwrl.discovery.loading import Installed, LoadFailure, PluginFault, ask, load_hooks
from hwrl.errors import ConfigError, EngineError

PLUGIN_ENTRY_POINTS = "hwrl.plugins"
"""The entry-point group in which plugins are registered."""


def load_hook(
    name: str,
    hook: str,
    *,
    asked_by: str,
    built_in: Iterable[str] = (),
    optional: bool = False,
    entry_points: Iterable[EntryPoint] | None = None,
) -> Any:
    """Return the function that calls ``hook`` of the plugin ``name``; it takes keyword arguments.

    ``asked_by`` is the configuration key that holds ``name``, and ``built_in`` are the names that need no plugin: both
    for the errors. If the hook is ``optional`` and the plugin does not have it, the function does nothing.
    ``entry_points`` default to what is installed. Raises ConfigError if no plugin has that name, EngineError if it is
    broken or does not have the hook. The function raises what the plugin does if that is a HwrlError, else EngineError.
    """
    found = importlib.metadata.entry_points(group=PLUGIN_ENTRY_POINTS) if entry_points is None else entry_points
    installed = Installed(found, load_hooks)
    if name not in installed.names():
        raise _unknown(name, asked_by, sorted({*built_in, *_with_hook(installed, hook)}))
    manager = installed.load(name)
    if isinstance(manager, LoadFailure):
        raise EngineError(
            f"{asked_by}={name} cannot be used", why=str(manager), fix="fix, upgrade or uninstall that distribution"
        )
    caller = getattr(manager.hook, hook)
    if not caller.get_hookimpls() and not optional:
        raise EngineError(
            f"{asked_by}={name} cannot be used",
            why=f"the plugin {name!r} does not have the hook {hook}",
            fix=f"choose one of {', '.join(sorted({*built_in, *_with_hook(installed, hook)}))}",
        )

    def call(**arguments: Any) -> Any:
        try:
            return ask(caller, Any, **arguments)
        except PluginFault as fault:
            raise EngineError(
                f"{asked_by}={name} cannot be used",
                why=f"the plugin {name!r} failed: {fault}",
                fix="look at the exception that this one was raised from",
            ) from fault.__cause__

    return call


def _with_hook(installed: Installed[pluggy.PluginManager], hook: str) -> Iterator[str]:
    """Yield the names that may be chosen; of a plugin that cannot be loaded, too, for choosing it tells why."""
    for name in installed.names():
        manager = installed.load(name)
        if isinstance(manager, LoadFailure) or getattr(manager.hook, hook).get_hookimpls():
            yield name


def _unknown(name: str, asked_by: str, known: list[str]) -> ConfigError:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    suggestion = f"did you mean {close[0]!r}? " if close else ""
    return ConfigError(
        f"{asked_by}={name} is not possible",
        why=f"the installed names are {', '.join(known)}",
        fix=f"{suggestion}choose an installed name, or install the package that brings {name!r}",
    )
