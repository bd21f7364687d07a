"""Plugins other than backends, such as train engines. The configuration names them.

They are entry points of the group ``hwrl.plugins``. The configuration uses the entry point's name; its value is the
plugin module. A run imports only the named plugins.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pluggy

from hwrl.discovery.loading import Installed, LoadFailure, PluginFault, call_hook, load_hooks
from hwrl.errors import ConfigError, EngineError, did_you_mean

PLUGIN_ENTRY_POINTS = "hwrl.plugins"
"""The entry-point group of plugins."""


def installed_plugins(entry_points: Iterable[EntryPoint] | None = None) -> Installed[pluggy.PluginManager]:
    """Return the installed plugins; none is loaded yet. ``entry_points`` default to those of all distributions."""
    found = importlib.metadata.entry_points(group=PLUGIN_ENTRY_POINTS) if entry_points is None else entry_points
    return Installed(found, load_hooks, first_hook="hwrl_commands")  # ``hwrl --help`` calls this hook


def load_hook(
    name: str,
    hook: str,
    *,
    asked_by: str,
    built_in: Iterable[str] = (),
    optional: bool = False,
    entry_points: Iterable[EntryPoint] | None = None,
) -> Any:
    """Load the plugin ``name`` and return a function to call its ``hook`` with keyword arguments.

    For the error messages, ``asked_by`` is the configuration key with the value ``name``, and ``built_in`` are the
    names without a plugin. If the hook is ``optional`` and the plugin lacks it, the function does nothing.
    ``entry_points`` default to the installed ones. Raises ConfigError if no plugin has this name, EngineError if the
    plugin is broken or lacks the hook. The function passes a HwrlError of the plugin on, and raises EngineError for
    any other exception.
    """
    installed = installed_plugins(entry_points)
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
            return call_hook(caller, Any, **arguments)
        except PluginFault as fault:
            raise EngineError(
                f"{asked_by}={name} cannot be used",
                why=f"the plugin {name!r} failed: {fault}",
                fix="look at the cause of this exception",
            ) from fault.__cause__

    return call


def plugins_with_hook(hook: str) -> list[str]:
    """Return the names of the installed plugins with ``hook``, and of broken ones: their use shows the reason."""
    return list(_with_hook(installed_plugins(), hook))


def _with_hook(installed: Installed[pluggy.PluginManager], hook: str) -> Iterator[str]:
    for name in installed.names():
        manager = installed.load(name)
        if isinstance(manager, LoadFailure) or getattr(manager.hook, hook).get_hookimpls():
            yield name


def _unknown(name: str, asked_by: str, known: list[str]) -> ConfigError:
    likely = did_you_mean(name.lower(), known)
    return ConfigError(
        f"{asked_by}={name} is not possible",
        why=f"the installed names are {', '.join(known)}",
        fix=f"{likely} choose an installed name, or install the package with {name!r}".lstrip(),
    )
