"""Refuse, at the start, a run that certainly does not fit the memory of its devices."""

from __future__ import annotations

from collections.abc import Iterable

from hwrl.discovery import load_hook
from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import Backend, Capability, EngineSettings, MemoryCause, RolloutSettings, peak_phase, phase_nbytes
from hwrl.rollout import embedded_memory
from hwrl.run.cluster.placement import has_devices
from hwrl.run.config import EMBEDDED, FSDP, Config
from hwrl.run.settings import critic_settings, engine_settings, reference_settings, rollout_settings
from hwrl.train import add_in_turns, certain_fsdp_memory, reference_memory


def check_rank(config: Config, backend: Backend, *, rank: int, alone: bool) -> None:
    """Raise DeviceMemoryError if this trainer rank certainly needs more than the memory of its device.

    ``alone``: all processes of the run are on this machine. If the device is the host itself, the first rank
    then checks all processes together. Does nothing on a backend without memory statistics.
    """
    if not backend.supports(Capability.MEMORY_STATS).usable:
        return
    total = backend.memory_info().total_nbytes
    if has_devices(backend):
        _check("a trainer rank", certain_rank_memory(config), total, config)
    elif rank == 0:
        _check_host(config, total, alone=alone)


def check_replica(config: Config, backend: Backend) -> None:
    """Raise DeviceMemoryError if a worker of this replica certainly needs more than the memory of its device."""
    if backend.supports(Capability.MEMORY_STATS).usable and has_devices(backend):
        total = backend.memory_info().total_nbytes
        _check("a replica worker", certain_worker_memory(config, device_nbytes=total), total, config)


def _check_host(config: Config, total: int, *, alone: bool) -> None:
    rank = certain_rank_memory(config)
    needed, whose, causes = _nbytes(rank), "a trainer rank", list(rank)
    if alone:
        worker = certain_worker_memory(config, device_nbytes=total)
        each = (config.train.ranks * _nbytes(rank), config.rollout.replicas * _nbytes(worker))
        needed = max(each) if config.takes_turns else sum(each)
        whose = f"{config.train.ranks} trainer rank(s) with {config.rollout.replicas} replica(s)"
        causes += worker
    if needed > total:
        raise _too_small(whose, needed, total, causes, config)


def _check(whose: str, causes: Iterable[MemoryCause], total: int, config: Config) -> None:
    known = [cause for cause in causes if cause.place == "device"]
    phase = peak_phase(known)
    needed = phase_nbytes(known, phase)
    if needed > total:
        raise _too_small(whose, needed, total, [cause for cause in known if phase in cause.phases], config)


def _nbytes(causes: Iterable[MemoryCause]) -> int:
    known = list(causes)
    on_device, on_host = peak_phase(known), peak_phase(known, place="host")
    return phase_nbytes(known, on_device) + phase_nbytes(known, on_host, place="host")


def _too_small(whose: str, needed: int, total: int, causes: Iterable[MemoryCause], config: Config) -> DeviceMemoryError:
    parts = ", ".join(f"{cause.cause} {gib(cause.nbytes)}" for cause in causes if cause.nbytes)
    devices = config.train.ranks + config.rollout.replicas * config.rollout.tensor_parallel
    return DeviceMemoryError(
        "the run does not fit",
        why=f"{needs(whose, needed, total)}: at least {parts}, plus activations and buffers",
        fix=f"find settings that fit with `hwrl plan CONFIG --devices {devices} --memory {total >> 20}MiB`",
    )


def needs(whose: str, nbytes: int, limit: int) -> str:
    """Return the sentence about a lack of memory, for a plan and for a refused run."""
    return f"{whose} needs {gib(nbytes)} and has {gib(limit)}"


def gib(nbytes: float) -> str:
    """Return ``nbytes`` as text in GiB, with one decimal."""
    return f"{nbytes / (1 << 30):.1f} GiB"


def plugin_memory(
    name: str,
    asked_by: str,
    options: object,
    settings: EngineSettings | RolloutSettings,
    ranks: int,
    device_nbytes: int,
) -> list[MemoryCause]:
    """Return the memory of a plugin's engine by its hook ``hwrl_engine_memory``; an empty list without the hook."""
    hook = load_hook(name, "hwrl_engine_memory", asked_by=asked_by, optional=True)
    return list(hook(settings=settings, options=options, ranks=ranks, device_nbytes=device_nbytes) or ())


def certain_rank_memory(config: Config) -> tuple[MemoryCause, ...]:
    """Return the certain part of a trainer rank's memory; nothing for a plugin's engine."""
    if config.train.engine != FSDP:
        return ()
    ranks, settings = config.train.ranks, engine_settings(config)
    causes = list(certain_fsdp_memory(settings, ranks=ranks))
    if config.has_reference_copy:
        causes = add_in_turns(causes, reference_memory(reference_settings(config), ranks=ranks)[:1], name="reference")
    if config.algorithm.has_critic:
        critic = certain_fsdp_memory(critic_settings(config), ranks=ranks, critic=True)
        causes += [cause for cause in add_in_turns([], critic, name="critic") if cause.certain]
    return tuple(causes)


def certain_worker_memory(config: Config, *, device_nbytes: int) -> tuple[MemoryCause, ...]:
    """Return the certain part of a replica worker's memory."""
    settings = rollout_settings(config)
    causes: Iterable[MemoryCause]
    if config.rollout.engine == EMBEDDED:
        causes = embedded_memory(settings)
    else:
        options = config.rollout.engine_options
        causes = plugin_memory(config.rollout.engine, "rollout.engine", options, settings, 1, device_nbytes)
    return tuple(cause for cause in causes if cause.certain)
