"""Choose one backend for this process.

Backends are entry points of the group ``hwrl.backends``: the name is the backend's name, the value its plugin module.
An alias is one more name for the same value. The first of these decides: :func:`set_backend`; the variable
``HWRL_BACKEND``; detection by the probes of all plugins.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any

from hwrl.discovery.loading import (
    Installed,
    LoadFailure,
    Plugin,
    PluginFault,
    call_hook,
    load_backend,
    one_line,
    reason_of,
)
from hwrl.errors import (
    BackendAlreadyChosenError,
    BackendAmbiguousError,
    BackendLoadError,
    BackendNotFoundError,
    BackendUnavailableError,
    ConfigError,
    HwrlError,
    did_you_mean,
)
from hwrl.interfaces import Backend, Kernels, ProbeContext, ProbeResult, RolloutSettings
from hwrl.interfaces.probing import PROBE_ROOT

BACKEND_ENTRY_POINTS = "hwrl.backends"
"""The entry-point group of backends."""
BACKEND_VARIABLE = "HWRL_BACKEND"
"""The environment variable with the backend's name; empty is the same as unset."""
TORCH_EXTENSIONS = "torch.backends"
"""The entry-point group of vendors' extensions of torch. Torch loads them itself."""


@dataclass(frozen=True)
class Probed:
    """One plugin's answer, and the duration of its probe.

    ``faulty``: the probe raised an exception or returned a wrong type. Then ``result`` says ``unknown`` and why.
    """

    plugin: Plugin
    result: ProbeResult
    duration_ms: float
    faulty: bool = False

    def __str__(self) -> str:
        evidence = f" (found {', '.join(self.result.evidence)})" if self.result.evidence else ""
        return f"{self.plugin.info.name} says {self.result.answer}: {self.result.reason}{evidence}"


@dataclass(frozen=True)
class Survey:
    """All installed backends: the loaded plugins with their answers, and the load failures."""

    probed: tuple[Probed, ...]
    failures: tuple[LoadFailure, ...]

    def reasons(self) -> str:
        """Return every answer and every failure in one line."""
        return "; ".join(str(item) for item in (*self.probed, *self.failures)) or "no backend is installed"


@dataclass(frozen=True)
class Choice:
    """The chosen plugin, and the reason in one sentence."""

    plugin: Plugin
    why: str


class Registry:
    """The backends of one process. Chooses at most once; thread-safe.

    ``entry_points``, ``env`` and ``context`` default to the installed entry points, ``os.environ`` and this machine.
    The registry writes the chosen backend's name to ``env``, so child processes choose the same.
    """

    def __init__(
        self,
        *,
        entry_points: Iterable[EntryPoint] | None = None,
        env: MutableMapping[str, str] | None = None,
        context: ProbeContext | None = None,
    ) -> None:
        self._env = os.environ if env is None else env
        self._context = ProbeContext(env=self._env) if context is None else context
        self._entry_points = entry_points
        self._installed: Installed[Plugin] | None = None
        self._backend: Backend | None = None
        self._host: Backend | None = None
        self._bootstrapped: set[str] = set()
        self._lock = threading.RLock()

    def get_backend(self) -> Backend:
        """Return this process's backend, choosing and creating it at the first call.

        The backend may see no device (:meth:`~hwrl.Backend.why_no_device` has the reason). This method does not touch
        devices: a process may still restrict them. Raises a :class:`~hwrl.errors.BackendError` with all reasons if no
        choice is safe; a later call tries again.
        """
        with self._lock:
            if self._backend is None:
                return self._adopt(self._made(self.choose().plugin))
            return self._backend

    def set_backend(self, choice: str | Backend) -> None:
        """Choose the backend by name or as an object, before its first use. It overrides ``HWRL_BACKEND``.

        The same choice again is fine; a different one raises :class:`~hwrl.errors.BackendAlreadyChosenError`. Also
        raises the errors of :meth:`get_backend`.
        """
        with self._lock:
            if self._backend is not None:
                self._check_same(self._backend, choice)
            elif isinstance(choice, Backend):
                self._adopt(choice)
            else:
                self._adopt(self._made(self._choose_named(choice, asked_by="set_backend").plugin))

    def host_backend(self) -> Backend:
        """Return the fallback backend. It serves the host of every device, and may be the chosen backend, too.

        Raises BackendUnavailableError if no fallback can run here.
        """
        with self._lock:
            if self._backend is not None and self._backend.info.fallback:
                return self._backend
            if self._host is None:
                able = [one for one in self.survey().probed if one.plugin.info.fallback and one.result.answer == "yes"]
                if not able:
                    raise BackendUnavailableError(
                        "no backend serves the host", why=self.survey().reasons(), fix="install hwrl's own backends"
                    )
                self._host = _create(_highest(able).plugin)
            return self._host

    def choose(self) -> Choice:
        """Return the choice by ``HWRL_BACKEND`` or detection; create no backend and import no torch."""
        with self._lock:
            name = self._env.get(BACKEND_VARIABLE, "").strip()
            if name:
                return self._choose_named(name, asked_by=BACKEND_VARIABLE)
            _refuse_misspelling(self._env)
            return _detect(self.survey(), self._context)

    def survey(self) -> Survey:
        """Load and probe all installed backends."""
        with self._lock:
            loaded = self._plugins().load_all()
            plugins = [item for item in loaded if isinstance(item, Plugin)]
            failures = tuple(item for item in loaded if isinstance(item, LoadFailure))
            context = replace(self._context)  # a new one: it keeps what it read, and the machine may have changed
            return Survey(tuple(_probe(plugin, context) for plugin in plugins), failures)

    def process_env(
        self, role: str, *, exports_memory: bool = False, shares_device: bool = False, devices: tuple[int, ...] = ()
    ) -> dict[str, str]:
        """Return the chosen backend's environment variables for a worker of ``role``, except those set in this process.

        With ``exports_memory`` other processes will open the worker's device memory; with ``shares_device`` they use
        its device, too. ``devices`` are the worker's devices. Empty if the backend needs none, or is an object without
        a plugin.
        """
        plugin = self._chosen_plugin()
        if plugin is None:
            return {}
        wanted = _call_hook(
            plugin,
            "hwrl_process_env",
            dict[str, str] | None,
            role=role,
            env=dict(self._env),
            exports_memory=exports_memory,
            shares_device=shares_device,
            devices=devices,
        )
        return {variable: value for variable, value in (wanted or {}).items() if variable not in self._env}

    def bootstrap(self, framework: str) -> None:
        """Let the chosen backend's plugin prepare this process for ``framework``. Call it before the import.

        ``framework`` is an import name. Only the first call for it does anything. Raises
        :class:`~hwrl.errors.BackendUnavailableError` if the plugin has this hook but the process has already imported
        the framework.
        """
        with self._lock:
            plugin = self._chosen_plugin()
            if plugin is None or framework in self._bootstrapped:
                return
            if not plugin.manager.hook.hwrl_bootstrap.get_hookimpls():
                return
            if framework in sys.modules:
                raise BackendUnavailableError(
                    f"{framework} cannot be prepared for backend {self.get_backend().info.name!r}",
                    why="this process has already imported it, so it is too late to change its imports",
                    fix=f"call hwrl.discovery.bootstrap({framework!r}) before anything imports {framework}",
                )
            _call_hook(plugin, "hwrl_bootstrap", Any, framework=framework)
            self._bootstrapped.add(framework)

    def engine_args(
        self,
        framework: str,
        options: Mapping[str, Any] | None = None,
        *,
        settings: RolloutSettings | None = None,
        key: str = "",
    ) -> dict[str, Any]:
        """Return arguments for an engine of ``framework``, an import name: what this device needs, and ``options``.

        Call it in the process that makes the engine, before it does: the backend may set environment variables.
        ``settings`` are the engine's; None if another program makes it. Options that are mappings are merged key by
        key. Raises ConfigError, with the option's name behind ``key``, if one contradicts what the device needs, and
        whatever the backend refuses.
        """
        plugin = self._chosen_plugin()
        needed = None
        if plugin is not None:
            needed = _call_hook(
                plugin,
                "hwrl_engine_args",
                dict[str, Any] | None,
                framework=framework,
                settings=settings,
                options=options or {},
            )
        return _merged(needed or {}, options or {}, key)

    def kernels(self) -> Kernels:
        """Return the chosen backend's fused operations; each is None if the backend has none."""
        plugin = self._chosen_plugin()
        if plugin is None:
            return Kernels()
        return _call_hook(plugin, "hwrl_kernels", Kernels | None) or Kernels()

    def _chosen_plugin(self) -> Plugin | None:
        """Return the chosen backend's plugin; None if set_backend got an object without one."""
        return self._plugin(self.get_backend().info.name)

    def _plugin(self, name: str) -> Plugin | None:
        loaded = self._plugins().load(name) if name in self._plugins().names() else None
        return loaded if isinstance(loaded, Plugin) else None

    def _plugins(self) -> Installed[Plugin]:
        if self._installed is None:
            found = (
                importlib.metadata.entry_points(group=BACKEND_ENTRY_POINTS)
                if self._entry_points is None
                else self._entry_points
            )
            self._installed = Installed(found, load_backend, first_hook="hwrl_probe")
        return self._installed

    def _made(self, plugin: Plugin) -> Backend:
        """Return the plugin's backend: the host's backend if the plugin made it already, else a new one."""
        return self._host if self._host is not None and self._host.info == plugin.info else _create(plugin)

    def _adopt(self, backend: Backend) -> Backend:
        self._backend = backend
        if backend.info.name in self._plugins().names():  # child processes can find it
            self._env[BACKEND_VARIABLE] = backend.info.name
        return backend

    def _check_same(self, chosen: Backend, choice: str | Backend) -> None:
        if choice is chosen or choice == chosen.info.name:
            return
        plugin = self._plugin(choice) if isinstance(choice, str) else None
        if plugin is not None and plugin.info.name == chosen.info.name:
            return
        raise BackendAlreadyChosenError(
            f"cannot choose backend {choice!r} now",
            why=f"this process already uses {chosen!r}",
            fix="call set_backend once, before anything uses the backend",
        )

    def _choose_named(self, name: str, *, asked_by: str) -> Choice:
        if name not in self._plugins().names():
            raise self._not_found(name, asked_by=asked_by)
        plugin = self._plugins().load(name)
        if isinstance(plugin, LoadFailure):
            raise BackendLoadError(
                f"backend {name!r} cannot be used",
                why=str(plugin),
                fix="fix, upgrade or uninstall that distribution; `hwrl doctor` shows all of them",
            )
        probed = _probe(plugin, self._context)
        if probed.faulty:
            raise _broken(plugin, probed.result.reason.partition(": ")[2])
        if probed.result.answer == "no":
            others = [other for other in self._plugins().names() if other not in plugin.names]
            raise BackendUnavailableError(
                f"backend {name!r} cannot run here",
                why=f"{asked_by} asks for it, but {probed}",
                fix="fix what the reason names" + (f", or choose another of {', '.join(others)}" if others else ""),
            )
        return Choice(plugin, f"{asked_by} asks for {name!r}; {probed}")

    def _not_found(self, name: str, *, asked_by: str) -> BackendNotFoundError:
        known = self._plugins().names()
        likely = did_you_mean(str(name).lower(), known)
        # This only collects load failures for the message: one may explain the missing name.
        failures = "".join(f"; {failure}" for failure in self.survey().failures)
        return BackendNotFoundError(
            f"there is no backend {name!r}",
            why=f"{asked_by} asks for it, but the installed names are {', '.join(known) or '(none)'}{failures}",
            fix=f"{likely} choose an installed name, or install the package with {name!r}".lstrip(),
        )


def _probe(plugin: Plugin, context: ProbeContext) -> Probed:
    started_s = time.perf_counter()
    faulty = False
    try:
        answer = call_hook(plugin.manager.hook.hwrl_probe, ProbeResult, context=context)
        result = replace(answer, reason=one_line(answer.reason), evidence=tuple(map(one_line, answer.evidence)))
    except (PluginFault, HwrlError) as fault:
        result, faulty = ProbeResult("unknown", f"its plugin is broken: {reason_of(fault)}"), True
    return Probed(plugin, result, (time.perf_counter() - started_s) * 1000, faulty)


def _broken(plugin: Plugin, reason: str) -> BackendLoadError:
    return BackendLoadError(
        f"backend {plugin.info.name!r} cannot be used",
        why=f"the plugin {plugin.value} of {plugin.distribution} is broken: {reason}",
        fix=f"fix, upgrade or uninstall {plugin.distribution}",
    )


def _call_hook(plugin: Plugin, hook: str, kind: Any, **arguments: Any) -> Any:
    """Return the plugin's answer to ``hook``; raise BackendLoadError if it is not of type ``kind``."""
    try:
        return call_hook(getattr(plugin.manager.hook, hook), kind, **arguments)
    except PluginFault as fault:
        raise _broken(plugin, str(fault)) from fault.__cause__


def _merged(needed: Mapping[str, Any], options: Mapping[str, Any], key: str) -> dict[str, Any]:
    merged = {**needed, **options}
    for name in needed.keys() & options.keys():
        place, wanted, value = f"{key}.{name}".removeprefix("."), needed[name], options[name]
        if isinstance(wanted, Mapping) and isinstance(value, Mapping):
            merged[name] = _merged(wanted, value, place)
        elif wanted != value:
            raise ConfigError(
                f"{place}={value!r} cannot be set",
                why=f"engines on this device need {wanted!r} there",
                fix="write a mapping: it is merged" if isinstance(wanted, Mapping) else "remove it",
            )
    return merged


def _create(plugin: Plugin) -> Backend:
    try:
        backend: Backend = call_hook(plugin.manager.hook.hwrl_create_backend, Backend)
    except PluginFault as fault:
        raise BackendUnavailableError(
            f"backend {plugin.info.name!r} cannot be created",
            why=f"{plugin.value}: {fault}",
            fix="fix the cause; `hwrl doctor` shows versions and variables",
        ) from fault.__cause__
    if getattr(backend, "info", None) != plugin.info:
        raise _broken(plugin, "its backend has another info than its hwrl_backend_info: pass that to Backend.__init__")
    return backend


def _refuse_misspelling(env: Iterable[str]) -> None:
    """Raise if a variable's name looks like a misspelt ``HWRL_BACKEND``: never ignore what the user asked for.

    A name that is two characters longer, or more, is another program's.
    """
    names = (name for name in env if name != BACKEND_VARIABLE and len(name) <= len(BACKEND_VARIABLE) + 1)
    others = {name.upper(): name for name in names}
    for close in difflib.get_close_matches(BACKEND_VARIABLE, others, n=1, cutoff=0.85):
        name = others[close]
        raise BackendNotFoundError(
            f"the environment variable {name} chooses no backend",
            why=f"hwrl reads {BACKEND_VARIABLE}, which is not set, and {name} looks like it",
            fix=f"set {BACKEND_VARIABLE} instead, or unset {name}",
        )


def _detect(survey: Survey, context: ProbeContext) -> Choice:
    able = [probed for probed in survey.probed if probed.result.answer == "yes"]
    devices = [probed for probed in able if not probed.plugin.info.fallback]
    if devices:
        return _highest(devices)
    if not able:
        raise BackendUnavailableError(
            "no backend can run here", why=survey.reasons(), fix="fix one of them, or install a backend that can"
        )
    choice = _highest(able)
    _refuse_unsafe_fallback(choice, survey, context)
    return choice


def _highest(able: list[Probed]) -> Choice:
    rank = max(probed.result.rank for probed in able)
    best = [probed for probed in able if probed.result.rank == rank]
    if len(best) > 1:
        names = " or ".join(probed.plugin.info.name for probed in best)
        raise BackendAmbiguousError(
            f"cannot choose between {names}",
            why=f"both can run here with rank {rank}: {'; '.join(map(str, best))}",
            fix=f"set {BACKEND_VARIABLE} to {names}",
        )
    return Choice(best[0].plugin, f"detected; {best[0]}")


def _refuse_unsafe_fallback(choice: Choice, survey: Survey, context: ProbeContext) -> None:
    """Raise if there are signs of another device: a slow run on the fallback must not go unnoticed."""
    doubts = [str(failure) for failure in survey.failures]
    others = [probed.plugin.info for probed in survey.probed if not probed.plugin.info.fallback]
    for probed in survey.probed:
        if probed.result.evidence or (probed.result.answer == "unknown" and probed.plugin.info in others):
            doubts.append(str(probed))
    for entry in importlib.metadata.entry_points(group=TORCH_EXTENSIONS):
        module = entry.value.partition(":")[0].partition(".")[0]
        if not module.endswith(tuple(info.device_type for info in others)):
            doubts.append(
                f"torch has an extension {module!r} ({entry.group}), and no installed backend is for its device"
            )
    if not context.root.is_dir():
        doubts.append(f"probes look under {PROBE_ROOT}={context.root}, and there is no such folder")
    if doubts:
        name = choice.plugin.info.name
        raise BackendAmbiguousError(
            f"will not fall back to {name!r} by itself",
            why="; ".join(doubts),
            fix=f"fix these causes, or install the device's backend; "
            f"or set {BACKEND_VARIABLE}={name} if {name!r} is meant",
        )


_PROCESS = Registry()


get_backend = _PROCESS.get_backend
set_backend = _PROCESS.set_backend
host_backend = _PROCESS.host_backend
process_env = _PROCESS.process_env
bootstrap = _PROCESS.bootstrap
engine_args = _PROCESS.engine_args
kernels = _PROCESS.kernels


def backend_or_default(backend: Backend | None) -> Backend:
    """Return ``backend``, or this process's backend if it is None."""
    return get_backend() if backend is None else backend
