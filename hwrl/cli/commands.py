"""Find subcommands: a built-in one is a module; for others, all plugins are loaded."""

from __future__ import annotations

import importlib
import re
from collections import Counter, defaultdict

import pluggy

from hwrl.discovery.loading import LoadFailure, PluginFault, call_hook, reason_of, run_plugin_code
from hwrl.discovery.plugins import installed_plugins
from hwrl.discovery.typed import type_mismatch
from hwrl.errors import ConfigError, HwrlError
from hwrl.interfaces import Command

BUILT_IN = ("train", "scale", "doctor", "conformance")
"""The built-in subcommands. Each is a module here with ``HELP``, ``configure`` and ``run``."""

_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_.-]*")


class Commands:
    """The subcommands of this process. A built-in command loads no plugin; any other loads all plugins.

    After :meth:`find` and :meth:`all`, ``problems`` holds a sentence for each failed plugin and for each name claimed
    by several plugins. Neither affects the other commands.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._claims: dict[str, list[tuple[str, Command]]] | None = None

    def find(self, name: str) -> Command | None:
        """Return the command ``name``, None if there is none; raise ConfigError if several plugins add it."""
        if name in BUILT_IN:
            return _built_in(name)
        claims = self._load().get(name, [])
        if len(claims) > 1:
            raise ConfigError(
                f"hwrl {name} cannot run", why=_conflict(name, claims), fix="uninstall all but one of these plugins"
            )
        return claims[0][1] if claims else None

    def all(self) -> list[Command]:
        """Return every command, the built-in ones first, without the names claimed by several plugins."""
        claims = self._load()
        self.problems += [_conflict(name, each) for name, each in sorted(claims.items()) if len(each) > 1]
        return [*map(_built_in, BUILT_IN), *(each[0][1] for _, each in sorted(claims.items()) if len(each) == 1)]

    def _load(self) -> dict[str, list[tuple[str, Command]]]:
        """Return the plugins' commands by name, each with its plugin."""
        if self._claims is None:
            self._claims = defaultdict(list)
            installed = installed_plugins()
            # An alias is one more name of the same plugin: ask each plugin once.
            plugins = {id(installed.load(name)): (name, installed.load(name)) for name in installed.names()}
            for name, manager in plugins.values():
                for command in self._request(name, manager):
                    self._claims[command.name].append((name, command))
        return self._claims

    def _request(self, plugin: str, manager: pluggy.PluginManager | LoadFailure) -> tuple[Command, ...]:
        if isinstance(manager, LoadFailure):
            self.problems.append(f"no commands of a plugin: {manager}")
            return ()
        try:
            answer = call_hook(manager.hook.hwrl_commands, object)
            commands = run_plugin_code(lambda: tuple(answer or ()))
            wrong = type_mismatch(commands, tuple[Command, ...], name="its answer") or _why_not_added(commands)
        except (PluginFault, HwrlError) as fault:
            wrong = reason_of(fault)
        if not wrong:
            return commands
        self.problems.append(f"no commands of the plugin {plugin!r}: {wrong}")
        return ()


def _built_in(name: str) -> Command:
    module = importlib.import_module(f"hwrl.cli.{name}")
    return Command(name, module.HELP, module.configure, module.run)


def _why_not_added(commands: tuple[Command, ...]) -> str:
    wrong = ", ".join(repr(command.name) for command in commands if not _NAME.fullmatch(command.name))
    if wrong:
        return f"the name of a command is letters, digits, '-', '_' and '.', a letter or digit first, not {wrong}"
    counts = Counter(command.name for command in commands)
    if twice := ", ".join(name for name, count in counts.items() if count > 1):
        return f"it adds several commands of this name: {twice}"
    taken = ", ".join(command.name for command in commands if command.name in BUILT_IN)
    return f"hwrl itself has a command of this name: {taken}" if taken else ""


def _conflict(name: str, claims: list[tuple[str, Command]]) -> str:
    return f"the plugins {' and '.join(plugin for plugin, _ in claims)} all add the command {name!r}"
