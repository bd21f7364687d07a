"""Load entry points as checked plugins. A broken one becomes a LoadFailure and does not affect the others.

Each plugin has its own plugin manager. We do not use pluggy's loader: one broken entry point ends the loading of all,
and of two entry points with the same name it silently drops the second.
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
from hwrl.discovery.rehearsal import why_unsafe
from hwrl.discovery.typed import type_mismatch
from hwrl.errors import HwrlError, message_of
from hwrl.interfaces import API_VERSION, BackendInfo
from hwrl.output import printable

MANDATORY_HOOKS = ("hwrl_backend_info", "hwrl_probe", "hwrl_create_backend")
"""The hooks of every backend plugin."""

_LoadedT = TypeVar("_LoadedT")
_AnswerT = TypeVar("_AnswerT")
_MOST_CHARACTERS = 2000
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")


class PluginFault(Exception):
    """A plugin raised an exception or broke a rule; the message is the reason, for users."""


def run_plugin_code(call: Callable[[], _AnswerT]) -> _AnswerT:
    """Run a plugin's code and return its result; raise PluginFault for any exception in it.

    This includes ``sys.exit`` and a vendor's own BaseException: a plugin must not end its caller. HwrlError and
    KeyboardInterrupt pass.
    """
    try:
        return call()
    except (HwrlError, PluginFault, KeyboardInterrupt):
        raise
    except BaseException as exc:
        raise PluginFault(one_line(f"{type(exc).__name__}: {message_of(exc)}")) from exc


def one_line(text: str) -> str:
    """Return a text from foreign code in one line of bounded length, without controls of a terminal."""
    return printable(" ".join(str.__str__(text)[:_MOST_CHARACTERS].split()))


def reason_of(fault: Exception) -> str:
    """Return the reason in a PluginFault, or in a HwrlError of a plugin, in one line."""
    if isinstance(fault, HwrlError):
        return one_line(f"{type(fault).__name__}: {fault.what}: {fault.why}")
    return str(fault)


def call_hook(caller: pluggy.HookCaller, kind: Any, **arguments: Any) -> Any:
    """Call a plugin's hook; return its answer, checked against the type ``kind`` (see :func:`type_mismatch`).

    Raises PluginFault if the plugin raises an exception or its answer has another type. A HwrlError of the plugin
    passes.
    """
    try:
        answer = run_plugin_code(lambda: caller(**arguments))
    except PluginFault as fault:
        raise PluginFault(f"its {caller.name} raised {fault}") from fault.__cause__
    wrong = run_plugin_code(lambda: type_mismatch(answer, kind))
    if wrong:
        raise PluginFault(f"its {caller.name} gave a wrong answer: {one_line(wrong)}")
    return answer


@dataclass(frozen=True)
class LoadFailure:
    """An unusable entry point, and the reason. ``names`` are its entry-point names, aliases included."""

    names: tuple[str, ...]
    value: str
    distribution: str
    reason: str

    def __str__(self) -> str:
        return f"{'/'.join(self.names)} ({self.value}, from {self.distribution}) cannot be loaded: {self.reason}"


@dataclass(frozen=True)
class Plugin:
    """A loaded backend plugin: its identity, its names, and the manager of its hooks."""

    info: BackendInfo
    names: tuple[str, ...]
    value: str
    distribution: str
    manager: pluggy.PluginManager


class Installed(Generic[_LoadedT]):
    """The installed entry points, by name. Each loads on first use, once.

    The function ``load`` gets an entry point and all its names. An exception in it becomes a LoadFailure. So does a
    plugin of another distribution that ends or blocks a process at its import, or in ``first_hook``, the hook that is
    called next.
    """

    def __init__(
        self,
        entry_points: Iterable[EntryPoint],
        load: Callable[[EntryPoint, tuple[str, ...]], _LoadedT],
        *,
        first_hook: str,
    ) -> None:
        self._load, self._first_hook = load, first_hook
        by_name: dict[str, list[EntryPoint]] = defaultdict(list)
        for entry in entry_points:
            by_name[entry.name].append(entry)
        self._entries = {name: entries[0] for name, entries in sorted(by_name.items()) if len(entries) == 1}
        self._duplicates = {name: _duplicate(name, entries) for name, entries in by_name.items() if len(entries) > 1}
        self._loaded: dict[str, _LoadedT | LoadFailure] = {}

    def names(self) -> list[str]:
        """Return every registered name, aliases and duplicates included, sorted."""
        return sorted([*self._entries, *self._duplicates])

    def load(self, name: str) -> _LoadedT | LoadFailure:
        """Load the entry point ``name``, one of :meth:`names`, and no other; return the result or the failure."""
        if name in self._duplicates:
            return self._duplicates[name]
        entry = self._entries[name]
        if entry.value not in self._loaded:
            self._loaded[entry.value] = self._attempt(entry)
        return self._loaded[entry.value]

    def _attempt(self, entry: EntryPoint) -> _LoadedT | LoadFailure:
        names = tuple(other.name for other in self._entries.values() if other.value == entry.value)
        try:
            if unsafe := why_unsafe(entry, self._first_hook):
                raise PluginFault(one_line(unsafe))
            return run_plugin_code(lambda: self._load(entry, names))
        except (PluginFault, HwrlError) as fault:
            return LoadFailure(names, entry.value, _distribution(entry), reason_of(fault))

    def load_all(self) -> list[_LoadedT | LoadFailure]:
        """Load every entry point; return each result and each failure once, however many names it has."""
        return list({id(loaded): loaded for loaded in map(self.load, self.names())}.values())


def _duplicate(name: str, entries: list[EntryPoint]) -> LoadFailure:
    claims = ", ".join(f"{entry.value} from {_distribution(entry)}" for entry in entries)
    reason = f"{len(entries)} entry points have this name ({claims}); uninstall all but one"
    return LoadFailure((name,), entries[0].value, _distribution(entries[0]), reason)


def _distribution(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown distribution"


def load_backend(entry: EntryPoint, names: tuple[str, ...]) -> Plugin:
    """Import a backend plugin and check it; raise an exception if it is broken."""
    plugin = entry.load()
    identify = getattr(plugin, "hwrl_backend_info", None)
    info = identify() if callable(identify) else None
    if isinstance(info, BackendInfo):
        _check_api(info)  # before the hooks: another version may have different ones
    manager = _managed(plugin)
    missing = [name for name in MANDATORY_HOOKS if not getattr(manager.hook, name).get_hookimpls()]
    if missing:
        raise PluginFault(f"it gives no {', '.join(missing)}; each needs @hwrl.hookimpl")
    if not isinstance(info, BackendInfo):
        raise PluginFault("its hwrl_backend_info does not return a hwrl.BackendInfo")
    _check_info(info, names)
    return Plugin(info, names, entry.value, _distribution(entry), manager)


def load_hooks(entry: EntryPoint, names: tuple[str, ...]) -> pluggy.PluginManager:
    """Import a plugin other than a backend and check its hooks; raise an exception if it is broken."""
    return _managed(entry.load())


def _check_api(info: BackendInfo) -> None:
    """Raise unless the plugin names its version of the interface, and this hwrl supports it."""
    installed = _dotted(API_VERSION)
    if info.api is None:
        raise PluginFault(
            f"its hwrl_backend_info does not say for which plugin API it was written; give BackendInfo the version as "
            f"numbers, such as api={API_VERSION} if it was written for the hooks of this hwrl"
        )
    wrong = type_mismatch(info.api, get_type_hints(BackendInfo)["api"], name="api")
    if wrong:
        raise PluginFault(f"its hwrl_backend_info gave a wrong answer: {wrong}; give two numbers, like {API_VERSION}")
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
    wrong = type_mismatch(info, BackendInfo)
    if wrong:
        raise PluginFault(f"its hwrl_backend_info gave a wrong answer: {wrong}")
    if not _NAME.fullmatch(info.name):
        raise PluginFault(
            f"it calls itself {info.name!r}, but a name has only small letters, digits and . _ -, because it is the "
            f"value of an environment variable"
        )
    if info.name not in names:
        raise PluginFault(f"it calls itself {info.name!r}, which must be one of its entry-point names {names}")


def _managed(plugin: object) -> pluggy.PluginManager:
    manager = pluggy.PluginManager("hwrl")
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    return manager
