"""Every hook of hwrl's plugins: the whole extension surface.

Hooks serve code that runs before torch, takes part in the choice of a backend, or comes from several plugins. Work on
a live device is in methods of :class:`~hwrl.Backend` instead. No hook is on a hot path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hwrl.interfaces import (
        Backend,
        BackendInfo,
        Command,
        EngineSettings,
        Finding,
        Kernels,
        MemoryCause,
        ProbeContext,
        ProbeResult,
        RolloutEngine,
        RolloutSettings,
        Tracker,
        TrainEngine,
    )

hookspec = pluggy.HookspecMarker("hwrl")
hookimpl = pluggy.HookimplMarker("hwrl")


@hookspec(firstresult=True)
def hwrl_backend_info() -> BackendInfo:
    """Return the backend's identity. Must import only hwrl and the standard library."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    """Return whether the backend can run here, and why. Must take only milliseconds and import no torch."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_create_backend() -> Backend:
    """Return the backend. May import torch and the vendor's library. A process creates at most one."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_process_env(
    role: str,
    env: Mapping[str, str],
    exports_memory: bool,  # noqa: FBT001 - pluggy passes by name
    shares_device: bool,  # noqa: FBT001 - pluggy passes by name
    devices: tuple[int, ...],
) -> dict[str, str]:
    """Return environment variables for a new worker of ``role``, given the driver's ``env``. Optional.

    hwrl sets only variables without a value in ``env``. ``exports_memory``: other processes will open the worker's
    device memory. ``shares_device``: other processes use its device, too. ``devices``: the worker's devices by their
    index among the driver's (on a cluster, among those of the worker's machine); hwrl makes only these visible. Empty
    if Ray chooses them.
    """
    raise NotImplementedError


@hookspec
def hwrl_bootstrap(framework: str) -> None:
    """Prepare this process for ``framework``, an import name, before its first import. Optional.

    hwrl calls it on the chosen backend's plugin, once, in the process that will import the framework.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_engine_args(
    framework: str, settings: RolloutSettings | None, options: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the arguments that engines of ``framework``, an import name, need on this device. Optional.

    hwrl calls it in the process that will make the engine, before it makes one: ``settings`` and the user's ``options``
    are the engine's. ``settings`` is None for an engine that another program made. The hook may set environment
    variables that the framework reads. A user's option that contradicts an argument is refused. Raise ConfigError if
    the environment, the settings, or an option cannot go with the device.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_kernels() -> Kernels | None:
    """Return the backend's fused operations, without those it lacks; None if it has none. Optional.

    May import torch and the vendor's library. hwrl calls it once per train engine, on the chosen backend's plugin.
    """
    raise NotImplementedError


@hookspec
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    """Yield lines for ``hwrl doctor`` about this device's environment. The limits of a probe apply. Optional."""
    raise NotImplementedError


@hookspec
def hwrl_check_engine(asked_by: str, options: Mapping[str, Any]) -> None:
    """Check, before anything starts, that this machine has the framework and that ``options`` are valid. Optional.

    ``asked_by`` is the configuration key with the plugin's name, ``train.engine`` or ``rollout.engine``; ``options``
    are the user's options for it. Raise the same errors as the engine's own hook. The limits of a probe apply: no
    torch, milliseconds.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_train_engine(
    settings: EngineSettings, options: Mapping[str, Any], backend: Backend, group: Any
) -> TrainEngine:
    """Return this rank's train engine; validate ``options``, the user's ``train.engine_options``. Optional.

    ``group``, a ``hwrl.comm.Group``, holds the training ranks; None for a single rank. hwrl calls it once per
    process. Raise ConfigError for an unknown option or model, EngineError if the framework is not installed.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_rollout_engine(settings: RolloutSettings, options: Mapping[str, Any], backend: Backend) -> RolloutEngine:
    """Return a replica's rollout engine; validate ``options``, the user's ``rollout.engine_options``. Optional.

    hwrl calls it once per process, in a process of its own for generation. Raise ConfigError for an unknown option or
    model, EngineError if the framework is not installed.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_engine_memory(
    settings: EngineSettings | RolloutSettings, options: Mapping[str, Any], ranks: int, device_nbytes: int
) -> Iterable[MemoryCause]:
    """Return the memory of one process of the plugin's engine, for ``hwrl plan``. Optional.

    ``settings`` and ``options`` are those of the plugin's train engine, on ``ranks`` ranks, or of its rollout engine,
    for one worker (``ranks`` is 1). Each process has a device of ``device_nbytes``. Read the model's configuration
    only: there may be no device and no framework. It may take seconds. Raise the same errors as the engine's own hook.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_commands() -> Iterable[Command]:
    """Return the subcommands that the plugin adds to ``hwrl``. Optional.

    Called by ``hwrl --help``, and for every command not built in. Must take only milliseconds and import no torch.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_tracker(options: Mapping[str, Any]) -> Tracker:
    """Return a tracker of metrics, not yet started; ``options`` are the user's for it. Optional.

    hwrl calls it before a run starts anything, as a check, and again for each start of tracking; both in the process of
    ``hwrl train``. Import the tracker's library in :meth:`~hwrl.interfaces.Tracker.start`. Raise ConfigError for an
    unknown option, EngineError if the library is not installed.
    """
    raise NotImplementedError
