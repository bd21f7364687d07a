"""Refuse at the start what surely cannot fit: the certain memory of a process is more than its device has."""

from __future__ import annotations

from collections.abc import Iterable

from hwrl.errors import DeviceMemoryError
from hwrl.interfaces import MemoryCause, peak_phase, phase_nbytes
from hwrl.run.config import Config
from hwrl.run.plan.plan import gib
from hwrl.run.plan.processes import certain_rank_memory, certain_worker_memory


def check_rank(config: Config, *, device_nbytes: int) -> None:
    """Raise DeviceMemoryError if a trainer rank surely needs more than ``device_nbytes``, all of its device."""
    _check("trainer rank", certain_rank_memory(config), device_nbytes, config)


def check_replica(config: Config, *, device_nbytes: int) -> None:
    """Raise DeviceMemoryError if a worker of a replica surely needs more than ``device_nbytes``."""
    _check("replica worker", certain_worker_memory(config, device_nbytes=device_nbytes), device_nbytes, config)


def check_host(config: Config, *, device_nbytes: int) -> None:
    """Raise DeviceMemoryError if the processes of a run surely need more than their one host has.

    It is for a backend whose device is the host: all processes share ``device_nbytes``.
    """
    rank, worker = certain_rank_memory(config), certain_worker_memory(config, device_nbytes=device_nbytes)
    needed = config.train.ranks * _nbytes(rank) + config.rollout.replicas * _nbytes(worker)
    if needed > device_nbytes:
        whose = f"{config.train.ranks} trainer rank(s) and {config.rollout.replicas} replica(s)"
        raise _too_small(whose, needed, device_nbytes, [*rank, *worker], config)


def _check(whose: str, causes: Iterable[MemoryCause], device_nbytes: int, config: Config) -> None:
    known = [one for one in causes if one.place == "device"]
    phase = peak_phase(known)
    needed = phase_nbytes(known, phase)
    if needed > device_nbytes:
        raise _too_small(f"a {whose}", needed, device_nbytes, [one for one in known if phase in one.phases], config)


def _nbytes(causes: Iterable[MemoryCause]) -> int:
    known = list(causes)
    places = (phase_nbytes(known, peak_phase(known, place=place), place=place) for place in ("device", "host"))
    return sum(places)


def _too_small(
    whose: str, needed: int, device_nbytes: int, causes: Iterable[MemoryCause], config: Config
) -> DeviceMemoryError:
    parts = ", ".join(f"{one.cause} {gib(one.nbytes)}" for one in causes if one.nbytes)
    devices = config.train.ranks + config.rollout.replicas * config.rollout.tensor_parallel
    return DeviceMemoryError(
        f"the run does not fit: {whose} need{'s' if whose.startswith('a ') else ''} {gib(needed)}, and has "
        f"{gib(device_nbytes)}",
        why=f"at least {parts}; activations and buffers come on top",
        fix=f"`hwrl plan CONFIG --devices {devices} --memory {device_nbytes >> 30}GiB` names settings that fit",
    )
