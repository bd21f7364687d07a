"""The transports of other packages: entry points in the group ``hwrl.transports``, each a :class:`Transport` object."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping

from hwrl.discovery import PluginFault, run_plugin_code
from hwrl.errors import ConfigError
from hwrl.weights.transport import Transport
from hwrl.weights.transports import TRANSPORTS

TRANSPORT_ENTRY_POINTS = "hwrl.transports"
"""The entry-point group of transports. An entry has the transport's name and ``module:OBJECT``."""


def installed_transports() -> list[str]:
    """Return the names of hwrl's own and of all installed transports. Imports none of them."""
    found = importlib.metadata.entry_points(group=TRANSPORT_ENTRY_POINTS)
    return [*TRANSPORTS, *sorted({entry.name for entry in found} - set(TRANSPORTS))]


def with_transport(name: str) -> Mapping[str, Transport]:
    """Return TRANSPORTS and the installed transport ``name``, as ``transports`` of both ends of a link.

    Raises ConfigError if there is no transport of this name, or if its package is broken.
    """
    if name in TRANSPORTS:
        return TRANSPORTS
    found = list(importlib.metadata.entry_points(group=TRANSPORT_ENTRY_POINTS, name=name))
    if len(found) != 1:
        raise ConfigError(
            f"there is no transport {name!r}" if not found else f"{len(found)} packages have a transport {name!r}",
            why=f"known are {', '.join(installed_transports())}",
            fix="install its package, and only one with this name",
        )
    try:
        transport = run_plugin_code(found[0].load)
    except PluginFault as fault:
        raise _broken(name, str(fault)) from fault.__cause__
    if not isinstance(transport, Transport):
        raise _broken(name, f"{found[0].value} is a {type(transport).__name__}, not an hwrl.weights.Transport")
    return {**TRANSPORTS, name: transport}


def _broken(name: str, why: str) -> ConfigError:
    return ConfigError(f"the transport {name!r} cannot be used", why=why, fix="fix or upgrade its package")
