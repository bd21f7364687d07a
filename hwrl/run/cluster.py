"""The Ray of a run: a cluster that it joins, or one that it starts on this machine."""

from __future__ import annotations

import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from hwrl.errors import ConfigError
from hwrl.registry import get_backend
from hwrl.run.config import Config
from hwrl.run.inputs import is_local
from hwrl.run.placement import has_devices, plan_placement

_ADVICE = "ray._private.authentication.authentication_token_setup"
"""The logger by which Ray says that its processes use a token and how to turn that off. It goes on to do as it says.
Need not be quietened any more when it is no advice to who did not ask for anything."""

_starting = False  # Ray, in this process


@contextmanager
def ray_cluster(config: Config, *, say: Callable[[str], None]) -> Iterator[None]:
    """Join the Ray cluster that RAY_ADDRESS names, or start one on this machine, with room for the run's actors.

    One that is started has process groups of its own: what is sent to this process's group, as timeout(1) and job
    managers do, comes to this process alone, which still needs Ray to save a checkpoint. Ray ends with this process,
    however that ends; two of its agents may need a minute for that.
    """
    if is_local():
        plan_placement(
            config, get_backend(), devices=local_devices(config), one_machine=True
        )  # raises before Ray starts
        say("starting Ray on this machine")
        with _apart(), _without_advice():
            _connect(config, address="local", include_dashboard=False, **_room(config))
    else:
        address = os.environ["RAY_ADDRESS"]
        say(f"joining the Ray cluster {address}")
        _require_answer(address)
        _connect(config)
    try:
        yield
    finally:
        ray.shutdown()


def _require_answer(address: str) -> None:
    """Raise ConfigError if ``address`` is a host's port where nothing answers: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdecimal():
        return
    try:
        socket.create_connection((host, int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as exc:
        raise ConfigError(
            f"there is no Ray cluster at {address}",
            why=f"RAY_ADDRESS names it, and a connection failed: {exc}",
            fix="start that cluster, or unset RAY_ADDRESS, with which the run starts a Ray of its own",
        ) from exc


def _connect(config: Config, **options: Any) -> None:
    with _handlers_kept():
        ray.init(log_to_driver=False, configure_logging=False, namespace=f"hwrl-{config.dir.name}", **options)


def local_devices(config: Config) -> int:
    """Return how many devices this machine has for the run; without any, how many processes have room on it."""
    if has_devices(get_backend()):
        return get_backend().device_count()
    return max(config.train.ranks + config.rollout.replicas * config.rollout.tensor_parallel, os.cpu_count() or 1)


def _room(config: Config) -> dict[str, Any]:
    """Return what Ray is told that this machine has: it finds only the devices that it knows."""
    devices, count = get_backend().devices, local_devices(config)
    room = {} if devices.ray_resource is None else devices.ray_options(count)
    return room | {"num_cpus": max(count, os.cpu_count() or 1)}


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Keep this process's handlers of signals. That of ray.init for SIGTERM exits, wherever it is.

    May go when ray.init can be told to set none.
    """

    def keep(signalnum: int, handler: Any) -> Any:
        return signal.getsignal(signalnum)

    real, signal.signal = signal.signal, keep
    try:
        yield
    finally:
        signal.signal = real


@contextmanager
def _apart() -> Iterator[None]:
    """Give each process that is forked meanwhile a process group of its own.

    A hook does it, since Ray makes its processes itself: by Popen with preexec_fn, with which Python calls the hooks.
    May go when ray.init can be told to do so.
    """
    global _starting
    _starting = True
    try:
        yield
    finally:
        _starting = False


def _leave_group() -> None:
    if _starting:
        os.setpgid(0, 0)


os.register_at_fork(after_in_child=_leave_group)


@contextmanager
def _without_advice() -> Iterator[None]:
    logger = logging.getLogger(_ADVICE)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
