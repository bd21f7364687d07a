"""Refuse, at the start, a run that certainly does not fit: a process certainly needs more than its device has."""

from __future__ import annotations

from collections.abc import Iterable

from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import Backend, Capability, MemoryCause, peak_phase, phase_nbytes
from hwrl.run.cluster.placement import has_devices
from hwrl.run.config import Config
from hwrl.run.plan.plan import gib, needs, takes_turns
from hwrl.run.plan.processes import certain_rank_memory, certain_worker_memory


def check_rank(config: Config, backend: Backend, *, rank: int, alone: bool) -> None:
    """Raise DeviceMemoryError if this trainer rank certainly needs more memory than its device has.

    ``alone`` says that all processes of the run are on this machine. If the device is the host itself, the first rank
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
    """Raise DeviceMemoryError if a worker of this replica certainly needs more memory than its device has."""
    if backend.supports(Capability.MEMORY_STATS).usable and has_devices(backend):
        total = backend.memory_info().total_nbytes
        _check("a replica worker", certain_worker_memory(config, device_nbytes=total), total, config)


def _check_host(config: Config, total: int, *, alone: bool) -> None:
    rank = certain_rank_memory(config)
    needed, whose, causes = _nbytes(rank), "a trainer rank", list(rank)
    if alone:
        worker = certain_worker_memory(config, device_nbytes=total)
        each = (config.train.ranks * _nbytes(rank), config.rollout.replicas * _nbytes(worker))
        needed = max(each) if takes_turns(config) else sum(each)
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
