"""Turn entry points into checked plugins; what is wrong with one is recorded and touches no other.

Each plugin has a plugin manager of its own. pluggy's loader is not used, because one broken entry point aborts it for
all, and because it drops the second of two entry points of one name without a word.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Generic, TypeVar

import pluggy

from hwrl import hookspecs
from hwrl.backend import API_VERSION, BackendInfo

MANDATORY_HOOKS = ("hwrl_backend_info", "hwrl_probe", "hwrl_create_backend")
"""What every backend plugin must give."""

_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True)
class LoadFailure:
    """An entry point that cannot be used, and why. ``names`` are its entry-point names, aliases included."""

    names: tuple[str, ...]
    value: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"{'/'.join(self.names)} ({self.value}, from {self.distribution}) cannot be loaded: {self.reason}"


@dataclass(frozen=True)
class Plugin:
    """A loaded backend plugin: its identity, its names, and the manager that calls its hooks."""

    info: BackendInfo
    names: tuple[str, ...]
    value: str
    distribution: str
    manager: pluggy.PluginManager


class Installed(Generic[_Loaded]):
    """The entry points that are installed, by name; each is loaded when it is asked for, and once.

    ``load`` turns an entry point, with all its names, into what it gives; what it raises becomes a LoadFailure.
    """

    def __init__(
        self, entry_points: Iterable[EntryPoint], load: Callable[[EntryPoint, tuple[str, ...]], _Loaded]
    ) -> None:
        self._load = load
        by_name: dict[str, list[EntryPoint]] = defaultdict(list)
        for entry in entry_points:
            by_name[entry.name].append(entry)
        self._entries = {name: entries[0] for name, entries in sorted(by_name.items()) if len(entries) == 1}
        self._duplicates = {name: _duplicate(name, entries) for name, entries in by_name.items() if len(entries) > 1}
        self._loaded: dict[str, _Loaded | LoadFailure] = {}

    def names(self) -> list[str]:
        """Return every registered name, aliases and duplicates included, sorted."""
        return sorted([*self._entries, *self._duplicates])

    def load(self, name: str) -> _Loaded | LoadFailure:
        """Return what the entry point ``name``, one of :meth:`names`, gives; import nothing else."""
        if name in self._duplicates:
            return self._duplicates[name]
        entry = self._entries[name]
        if entry.value not in self._loaded:
            aliases = tuple(other.name for other in self._entries.values() if other.value == entry.value)
            self._loaded[entry.value] = _attempt(self._load, entry, aliases)
        return self._loaded[entry.value]

    def load_all(self) -> list[_Loaded | LoadFailure]:
        """Return what every entry point gives once, however many names it has, and every failure."""
        return list({id(loaded): loaded for loaded in map(self.load, self.names())}.values())


def _duplicate(name: str, entries: list[EntryPoint]) -> LoadFailure:
    claims = ", ".join(f"{entry.value} from {_distribution(entry)}" for entry in entries)
    reason = f"{len(entries)} entry points have this name ({claims}); uninstall all but one"
    return LoadFailure((name,), entries[0].value, _distribution(entries[0]), reason)


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"


def _attempt(
    load: Callable[[EntryPoint, tuple[str, ...]], _Loaded], entry: EntryPoint, names: tuple[str, ...]
) -> _Loaded | LoadFailure:
    try:
        return load(entry, names)
    except Exception as exc:  # noqa: BLE001 - foreign code may raise anything; the reason is kept and shown
        reason = str(exc) if isinstance(exc, _UnfitPlugin) else f"{type(exc).__name__}: {exc}"
        return LoadFailure(names, entry.value, _distribution(entry), reason)


def load_backend(entry: EntryPoint, names: tuple[str, ...]) -> Plugin:
    """Import and check a backend plugin; raise whatever is wrong with it."""
    info, manager = _checked(entry.load(), names)
    return Plugin(info, names, entry.value, _distribution(entry), manager)


def load_hooks(entry: EntryPoint, names: tuple[str, ...]) -> pluggy.PluginManager:
    """Import a plugin that is no backend and check its hooks; raise whatever is wrong with it."""
    return _managed(entry.load())


class _UnfitPlugin(Exception):
    """The plugin was imported and breaks the rules; the message is a reason for a person."""


def _checked(plugin: object, names: tuple[str, ...]) -> tuple[BackendInfo, pluggy.PluginManager]:
    info = _identity(plugin)
    if info is not None and info.api[0] != API_VERSION[0]:  # before its hooks: another version may have others
        raise _UnfitPlugin(
            f"it is written for hwrl's plugin API {'.'.join(map(str, info.api))} and this is "
            f"{'.'.join(map(str, API_VERSION))}; install a matching version of it"
        )
    manager = _managed(plugin)
    missing = [name for name in MANDATORY_HOOKS if not getattr(manager.hook, name).get_hookimpls()]
    if missing:
        raise _UnfitPlugin(f"it gives no {', '.join(missing)}; each needs @hwrl.hookimpl")
    if info is None:
        raise _UnfitPlugin("its hwrl_backend_info does not return a hwrl.BackendInfo")
    if info.name not in names:
        raise _UnfitPlugin(f"it calls itself {info.name!r}, which must be one of its entry-point names {names}")
    return info, manager


def _managed(plugin: object) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("hwrl")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    return manager


def _identity(plugin: object) -> BackendInfo | None:
    function = getattr(plugin, "hwrl_backend_info", None)
    info = function() if callable(function) else None
    return info if isinstance(info, BackendInfo) else None
