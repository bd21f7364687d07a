"""What the kit checks: a :class:`Subject`, found by its name, and the engines and transports behind it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hwrl.discovery import BACKEND_ENTRY_POINTS, load_hook, plugins_with_hook
from hwrl.errors import ConfigError, did_you_mean
from hwrl.testing.levels import Kind

if TYPE_CHECKING:
    from hwrl.comm import Group
    from hwrl.interfaces import Backend, EngineSettings, RolloutEngine, RolloutSettings, TrainEngine

_BUILT_IN = {Kind.TRAIN_ENGINE: ["fsdp"], Kind.ROLLOUT_ENGINE: ["embedded"]}
_HOOKS = {Kind.TRAIN_ENGINE: "hwrl_train_engine", Kind.ROLLOUT_ENGINE: "hwrl_rollout_engine"}


@dataclass(frozen=True)
class Subject:
    """A backend, an engine or a transport under test. ``options`` are the user's options of an engine.

    A check pickles it for its processes, and they make their engine from it.
    """

    kind: Kind
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.name}"

    def make_train_engine(
        self, settings: EngineSettings, *, backend: Backend, group: Group | None = None
    ) -> TrainEngine:
        """Return a new train engine of this name. Raises the errors of the plugin's hook."""
        if self.name in _BUILT_IN[Kind.TRAIN_ENGINE]:
            from hwrl.train import FsdpEngine

            return FsdpEngine(settings, backend=backend, group=group)
        engine: TrainEngine = self._hook()(settings=settings, options=self.options, backend=backend, group=group)
        return engine

    def make_rollout_engine(self, settings: RolloutSettings, *, backend: Backend) -> RolloutEngine:
        """Return a new rollout engine of this name. Raises the errors of the plugin's hook."""
        if self.name in _BUILT_IN[Kind.ROLLOUT_ENGINE]:
            from hwrl.rollout import EmbeddedEngine

            return EmbeddedEngine.from_settings(settings, backend=backend)
        engine: RolloutEngine = self._hook()(settings=settings, options=self.options, backend=backend)
        return engine

    def _hook(self) -> Callable[..., Any]:
        setting = "train.engine" if self.kind is Kind.TRAIN_ENGINE else "rollout.engine"
        hook: Callable[..., Any] = load_hook(
            self.name, _HOOKS[self.kind], asked_by=setting, built_in=_BUILT_IN[self.kind]
        )
        return hook


def find_subject(name: str, *, kind: Kind | None = None, options: Mapping[str, Any] | None = None) -> Subject:
    """Return the installed or built-in subject ``name``, of ``kind`` if that is given.

    Loads every plugin, but no backend. Raises ConfigError if the name is unknown, if several kinds have it, and if
    anything but an engine of a plugin gets ``options``.
    """
    kinds = [each for each in Kind if kind in (None, each) and name in installed_names(each)]
    if not kinds:
        raise _unknown(name, kind)
    if len(kinds) > 1:
        raise ConfigError(
            f"{name!r} is ambiguous",
            why=f"it is the name of a {' and of a '.join(kinds)}",
            fix=f"add --kind {kinds[0]}, or --kind {kinds[1]}",
        )
    if options and (kinds[0] not in _HOOKS or name in _BUILT_IN[kinds[0]]):
        raise ConfigError(
            f"the {kinds[0]} {name!r} takes no options",
            why="only an engine of a plugin has options",
            fix="leave them out",
        )
    return Subject(kinds[0], name, options or {})


def installed_names(kind: Kind) -> list[str]:
    """Return the names of the built-in and installed subjects of ``kind``. For an engine, loads every plugin."""
    if kind is Kind.TRANSPORT:
        from hwrl.weights import installed_transports

        return list(installed_transports())
    if kind is Kind.BACKEND:
        return [entry.name for entry in importlib.metadata.entry_points(group=BACKEND_ENTRY_POINTS)]
    return [*_BUILT_IN[kind], *plugins_with_hook(_HOOKS[kind])]


def _unknown(name: str, kind: Kind | None) -> ConfigError:
    known = sorted({name for each in Kind if kind in (None, each) for name in installed_names(each)})
    return ConfigError(
        f"there is no {kind or 'backend, engine or transport'} {name!r}",
        why=f"installed are {', '.join(known)}",
        fix=f"{did_you_mean(name.lower(), known)} choose one of them, or install its package".lstrip(),
    )
