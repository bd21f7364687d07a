"""Turn entry points into checked plugins; what is wrong with one is recorded and touches no other.

Each plugin has a plugin manager of its own. pluggy's loader is not used, because one broken entry point aborts it for
all, and because it drops the second of two entry points of one name without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pluggy

from hwrl import hookspecs
from hwrl.backend import API_VERSION, BackendInfo

MANDATORY_HOOKS = ("hwrl_backend_info", "hwrl_probe", "hwrl_create_backend")
"""What every backend plugin must give."""


@dataclass(frozen=True)
class LoadFailure:
    """An entry point that gives no backend, and why. ``names`` are its entry-point names, aliases included."""

    names: tuple[str, ...]
    value: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"{'/'.join(self.names)} ({self.value}, from {self.distribution}) cannot be loaded: {self.reason}"


@dataclass(frozen=True)
class Plugin:
    """A loaded entry point: its identity, its names, and the manager that calls its hooks."""

    info: BackendInfo
    names: tuple[str, ...]
    value: str
    distribution: str
    manager: pluggy.PluginManager


class Installed:
    """The entry points that are installed, by name; each is imported when it is asked for, and once."""

    def __init__(self, entry_points: Iterable[EntryPoint]) -> None:
        by_name: dict[str, list[EntryPoint]] = defaultdict(list)
        for entry in entry_points:
            by_name[entry.name].append(entry)
        self._entries = {name: entries[0] for name, entries in sorted(by_name.items()) if len(entries) == 1}
        self._duplicates = {name: _duplicate(name, entries) for name, entries in by_name.items() if len(entries) > 1}
        self._loaded: dict[str, Plugin | LoadFailure] = {}

    def names(self) -> list[str]:
        """Return every registered name, aliases and duplicates included, sorted."""
        return sorted([*self._entries, *self._duplicates])

    def load(self, name: str) -> Plugin | LoadFailure:
        """Return the plugin of that name, importing nothing else. ``name`` must be one of :meth:`names`."""
        if name in self._duplicates:
            return self._duplicates[name]
        entry = self._entries[name]
        if entry.value not in self._loaded:
            aliases = tuple(other.name for other in self._entries.values() if other.value == entry.value)
            self._loaded[entry.value] = _load(entry, aliases)
        return self._loaded[entry.value]

    def load_all(self) -> list[Plugin | LoadFailure]:
        """Return every plugin once, however many names it has, and every failure."""
        return list({id(loaded): loaded for loaded in map(self.load, self.names())}.values())


def _duplicate(name: str, entries: list[EntryPoint]) -> LoadFailure:
    claims = ", ".join(f"{entry.value} from {_distribution(entry)}" for entry in entries)
    reason = f"{len(entries)} entry points have this name ({claims}); uninstall all but one"
    return LoadFailure((name,), entries[0].value, _distribution(entries[0]), reason)


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"


def _load(entry: EntryPoint, names: tuple[str, ...]) -> Plugin | LoadFailure:
    try:
        info, manager = _checked(entry.load(), names)
    except Exception as exc:  # noqa: BLE001 - foreign code may raise anything; the reason is kept and shown
        reason = str(exc) if isinstance(exc, _UnfitPlugin) else f"{type(exc).__name__}: {exc}"
        return LoadFailure(names, entry.value, _distribution(entry), reason)
    return Plugin(info, names, entry.value, _distribution(entry), manager)


class _UnfitPlugin(Exception):
    """The plugin was imported and breaks the rules; the message is a reason for a person."""


def _checked(plugin: object, names: tuple[str, ...]) -> tuple[BackendInfo, pluggy.PluginManager]:
    info = _identity(plugin)
    if info is not None and info.api[0] != API_VERSION[0]:  # before its hooks: another version may have others
        raise _UnfitPlugin(
            f"it is written for hwrl's plugin API {'.'.join(map(str, info.api))} and this is "
            f"{'.'.join(map(str, API_VERSION))}; install a matching version of it"
        )
    manager = pluggy.PluginManager("hwrl")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    missing = [name for name in MANDATORY_HOOKS if not getattr(manager.hook, name).get_hookimpls()]
    if missing:
        raise _UnfitPlugin(f"it gives no {', '.join(missing)}; each needs @hwrl.hookimpl")
    if info is None:
        raise _UnfitPlugin("its hwrl_backend_info does not return a hwrl.BackendInfo")
    if info.name not in names:
        raise _UnfitPlugin(f"it calls itself {info.name!r}, which must be one of its entry-point names {names}")
    return info, manager


def _identity(plugin: object) -> BackendInfo | None:
    function = getattr(plugin, "hwrl_backend_info", None)
    info = function() if callable(function) else None
    return info if isinstance(info, BackendInfo) else None
