"""Turn entry points into checked plugins; what is wrong with one is recorded and touches no other.

Each plugin has a plugin manager of its own. pluggy's loader is not used, because one broken entry point aborts it for
all, and because it drops the second of two entry points of one name without a word.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any, Generic, TypeVar, get_type_hints

import pluggy

from hwrl.discovery import hookspecs
from hwrl.discovery.typed import why_not
from hwrl.errors import HwrlError
from hwrl.interfaces import API_VERSION, BackendInfo

MANDATORY_HOOKS = ("hwrl_backend_info", "hwrl_probe", "hwrl_create_backend")
"""What every backend plugin must give."""

_Loaded = TypeVar("_Loaded")
_Answer = TypeVar("_Answer")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class PluginFault(Exception):
    """A plugin raised, or broke a rule; the message is the reason, for a person."""


def contain(call: Callable[[], _Answer]) -> _Answer:
    """Return what ``call``, which runs a plugin's code, returns; raise PluginFault for whatever else ends it.

    That includes ``sys.exit`` and a vendor's own BaseException: a plugin must not end its caller. HwrlError and
    KeyboardInterrupt pass.
    """
    try:
        return call()
    except (HwrlError, PluginFault, KeyboardInterrupt):
        raise
    except BaseException as exc:
        raise PluginFault(f"{type(exc).__name__}: {exc}") from exc


def in_one_line(fault: Exception) -> str:
    """Return what a PluginFault, or the HwrlError that a plugin raised, says."""
    if isinstance(fault, HwrlError):
        return f"{type(fault).__name__}: {fault.what}: {fault.why}"
    return str(fault)


def ask(caller: pluggy.HookCaller, kind: Any, **arguments: Any) -> Any:
    """Return a plugin's answer to a hook, which must be of ``kind``, as :func:`hwrl.discovery.typed.why_not` takes it.

    Raises PluginFault if the plugin raises or answers otherwise, and what it raises itself if that is a HwrlError.
    """
    try:
        answer = contain(lambda: caller(**arguments))
    except PluginFault as fault:
        raise PluginFault(f"its {caller.name} raised {fault}") from fault.__cause__
    wrong = why_not(answer, kind)
    if wrong:
        raise PluginFault(f"its {caller.name} gave a wrong answer: {wrong}")
    return answer


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
        return contain(lambda: load(entry, names))
    except (PluginFault, HwrlError) as fault:
        return LoadFailure(names, entry.value, _distribution(entry), in_one_line(fault))


def load_backend(entry: EntryPoint, names: tuple[str, ...]) -> Plugin:
    """Import and check a backend plugin; raise whatever is wrong with it."""
    info, manager = _checked(entry.load(), names)
    return Plugin(info, names, entry.value, _distribution(entry), manager)


def load_hooks(entry: EntryPoint, names: tuple[str, ...]) -> pluggy.PluginManager:
    """Import a plugin that is no backend and check its hooks; raise whatever is wrong with it."""
    return _managed(entry.load())


def _checked(plugin: object, names: tuple[str, ...]) -> tuple[BackendInfo, pluggy.PluginManager]:
    info = _identity(plugin)
    if info is not None:
        _check_api(info)  # before its hooks: another version may have others
    manager = _managed(plugin)
    missing = [name for name in MANDATORY_HOOKS if not getattr(manager.hook, name).get_hookimpls()]
    if missing:
        raise PluginFault(f"it gives no {', '.join(missing)}; each needs @hwrl.hookimpl")
    if info is None:
        raise PluginFault("its hwrl_backend_info does not return a hwrl.BackendInfo")
    _check_info(info, names)
    return info, manager


def _check_api(info: BackendInfo) -> None:
    """Raise unless the plugin says for which version of the interface it was written, and that is this one's."""
    installed = _dotted(API_VERSION)
    if info.api is None:
        raise PluginFault(
            f"its hwrl_backend_info does not say for which plugin API it was written; give BackendInfo the version in "
            f"figures, such as api={API_VERSION} if it was written for the hooks of this hwrl"
        )
    wrong = why_not(info.api, get_type_hints(BackendInfo)["api"], name="api")
    if wrong:
        raise PluginFault(f"its hwrl_backend_info gave a wrong answer: {wrong}; give two figures, like {API_VERSION}")
    if info.api[0] != API_VERSION[0]:
        raise PluginFault(
            f"it is written for hwrl's plugin API {_dotted(info.api)} and this is {installed}; install a matching "
            f"version of it"
        )
    if info.api > API_VERSION:
        raise PluginFault(
            f"it is written for hwrl's plugin API {_dotted(info.api)}, newer than this {installed}; upgrade hwrl"
        )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _check_info(info: BackendInfo, names: tuple[str, ...]) -> None:
    wrong = why_not(info, BackendInfo)
    if wrong:
        raise PluginFault(f"its hwrl_backend_info gave a wrong answer: {wrong}")
    if not _NAME.fullmatch(info.name):
        raise PluginFault(
            f"it calls itself {info.name!r}, and a name is written in small letters, figures and . _ - alone, because "
            f"it stands in an environment variable"
        )
    if info.name not in names:
        raise PluginFault(f"it calls itself {info.name!r}, which must be one of its entry-point names {names}")


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
