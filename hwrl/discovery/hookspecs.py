"""The whole extension surface of hwrl: every hook that a plugin can implement.

A hook is used where code must run before torch, take part in choosing a backend, or be contributed by several
plugins; what acts on a live device is a method of :class:`~hwrl.interfaces.backend.Backend`. No hook is on a hot path.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from hwrl.interfaces import (
        Backend,
        BackendInfo,
        EngineSettings,
        Finding,
        Group,
        ProbeContext,
        ProbeResult,
        RolloutEngine,
        RolloutSettings,
        TrainEngine,
    )

hookspec = pluggy.HookspecMarker("hwrl")
hookimpl = pluggy.HookimplMarker("hwrl")


@hookspec(firstresult=True)
def hwrl_backend_info() -> BackendInfo:
    """Return the backend's identity. Must import nothing beyond hwrl and the standard library."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_probe(context: ProbeContext) -> ProbeResult:
    """Say whether the backend can run here, with the reason, in milliseconds, without importing torch."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_create_backend() -> Backend:
    """Return the backend. May import torch and the vendor's library; called once per process, when chosen."""
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_process_env(
    role: str,
    env: Mapping[str, str],
    exports_memory: bool,  # noqa: FBT001 - pluggy passes by name
    shares_device: bool,  # noqa: FBT001 - pluggy passes by name
    devices: tuple[int, ...],
) -> dict[str, str]:
    """Return the variables with which a worker of ``role`` should start, given the driver's ``env``. Optional.

    ``exports_memory``: other processes will open its device memory. ``shares_device``: others use its device, too.
    ``devices``: the worker's devices, by their numbers among those that the driver (on a cluster, the worker's machine)
    sees; hwrl shows it these alone. Empty where Ray chooses them.
    """
    raise NotImplementedError


@hookspec
def hwrl_bootstrap(framework: str) -> None:
    """Prepare this process for ``framework``, an import name such as ``megatron``, before its first import. Optional.

    Called on the chosen backend's plugin, in the process that will import the framework, once.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_engine_args(framework: str) -> dict[str, Any] | None:
    """Return the arguments that engines of ``framework``, an import name such as ``vllm``, need here. Optional."""
    raise NotImplementedError


@hookspec
def hwrl_doctor(context: ProbeContext) -> Iterable[Finding]:
    """Yield what ``hwrl doctor`` should tell about this device's environment; same limits as a probe. Optional."""
    raise NotImplementedError


@hookspec
def hwrl_check_engine(asked_by: str, options: Mapping[str, Any]) -> None:
    """Look, before anything starts, whether this machine has the framework, and whether it knows ``options``. Optional.

    ``asked_by`` is the key that names the plugin, ``train.engine`` or ``rollout.engine``; ``options`` are the user's
    for it. Raise what the engine's own hook would raise. The limits are a probe's: no torch, milliseconds.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_train_engine(
    settings: EngineSettings, options: Mapping[str, Any], backend: Backend, group: Group | None
) -> TrainEngine:
    """Return this rank's train engine; ``options`` are the user's ``train.engine_options``, to be validated here.

    ``group`` holds the training ranks; None if there is one. Called once per process. Raise ConfigError for an option
    or a model that the engine does not have, EngineError if the framework is not installed. Optional.
    """
    raise NotImplementedError


@hookspec(firstresult=True)
def hwrl_rollout_engine(settings: RolloutSettings, options: Mapping[str, Any], backend: Backend) -> RolloutEngine:
    """Return a replica's rollout engine; ``options`` are the user's ``rollout.engine_options``, to be validated here.

    Called once per process, which generates and does nothing else. Raise ConfigError for an option or a model that the
    engine does not have, EngineError if the framework is not installed. Optional.
    """
    raise NotImplementedError
