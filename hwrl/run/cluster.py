"""The Ray of a run: a cluster that it joins, or one that it starts on this machine."""

from __future__ import annotations

import itertools
import logging
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, EngineError, attempt_all
from hwrl.run.config import Config
from hwrl.run.inputs import is_local
from hwrl.run.placement import has_devices, plan_placement
from hwrl.run.privacy import admits_strangers, has_token, private_ray

_ADVICE = "ray._private.authentication.authentication_token_setup"
"""Ray logs here that a token is in use and how to turn that off. The run has set the mode itself."""
_CLIENT = "ray://"
_CLIENT_PORT = 10001
_TELL_AFTER_S = 10.0
_KILL_AFTER_TURNS = 3

_starting = False  # Ray, in this process


@contextmanager
def ray_cluster(config: Config, *, say: Callable[[str], None]) -> Iterator[None]:
    """Join the Ray cluster that RAY_ADDRESS names, or start one on this machine, with room for the run's actors.

    One that is started has process groups of its own: what is sent to this process's group, as timeout(1) and job
    managers do, comes to this process alone, which still needs Ray to save a checkpoint. Ray ends with this process,
    however that ends; two of its agents may need a minute for that.
    """
    with _start(config, say=say) if is_local() else _join(config, say=say):
        try:
            yield
        except BaseException as error:
            attempt_all(partial(_end_ray, say), after=error)
            raise
        _end_ray(say)


def _end_ray(say: Callable[[str], None]) -> None:
    """End this process's part of Ray, and a Ray that it started. Blocks, and says so if it takes long.

    Ray waits for its own processes; one that is frozen is killed after a while, if it is a child of this process.
    """
    ended = threading.Event()
    threading.Thread(target=_hurry, args=[ended, say], name="end of Ray", daemon=True).start()
    try:
        ray.shutdown()
    except OSError as exc:
        raise EngineError(
            "Ray did not end as it should",
            why=str(exc),
            fix="end the processes called raylet and gcs_server that are left; look at the limits (ulimit -a)",
        ) from exc
    finally:
        ended.set()


def _hurry(ended: threading.Event, say: Callable[[str], None]) -> None:
    for turn in itertools.count(1):
        if ended.wait(_TELL_AFTER_S):
            return
        say(f"waiting for Ray to end its processes for {turn * _TELL_AFTER_S:g} s")
        if turn == _KILL_AFTER_TURNS:
            for pid in _children_of_ray():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def _children_of_ray() -> list[int]:
    """Return the children of this process that are Ray's: raylet, GCS, and their helpers."""
    children = [
        int(pid) for task in Path("/proc/self/task").iterdir() for pid in (task / "children").read_text().split()
    ]
    return [pid for pid in children if b"/ray/" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@contextmanager
def _start(config: Config, *, say: Callable[[str], None]) -> Iterator[None]:
    plan_placement(config, get_backend(), devices=local_devices(config), one_machine=True)  # raises before Ray starts
    say("starting Ray on this machine")
    with private_ray() as directory:
        try:
            with _apart(), _without_advice():
                _connect(config, address="local", include_dashboard=False, _temp_dir=str(directory), **_room(config))
        except Exception as exc:
            ray.shutdown()  # what has been started
            raise not_started(exc, file_limit=resource.getrlimit(resource.RLIMIT_FSIZE)[0]) from exc
        if not ray.nodes()[0]["NodeManagerAddress"].startswith("127."):
            say("warning: this version of Ray listens on all interfaces; its token keeps others out")
        yield


@contextmanager
def _join(config: Config, *, say: Callable[[str], None]) -> Iterator[None]:
    address = os.environ["RAY_ADDRESS"]
    say(f"joining the Ray cluster {address}")
    reachable = _require_answer(address)
    try:
        is_open = reachable and _CLIENT not in address and admits_strangers(address)
        with _without_advice():
            _connect(config)
    except Exception as exc:
        raise _no_cluster(address, exc) from exc
    if is_open or not has_token():
        say(
            f"warning: the Ray cluster {address} has no authentication: whoever reaches it can run code as its user, "
            "read this run's data and end it; start its nodes with RAY_AUTH_MODE=token"
        )
    yield


def not_started(exc: Exception, *, file_limit: int) -> EngineError:
    """Return the error for a Ray that did not start because of ``exc``; ``file_limit`` is that of a file's bytes."""
    limited = file_limit != resource.RLIM_INFINITY
    lines = [line.strip() for line in str(exc).splitlines() if line.strip()]
    limit = f"; files may have {file_limit:,} bytes here (ulimit -f), and Ray's object store is one file"
    return EngineError(
        "Ray did not start on this machine",
        why=f"{type(exc).__name__}: {lines[0] if lines else 'no reason given'}{limit if limited else ''}",
        fix="run `ulimit -f unlimited` first"
        if limited
        else "look for limits of this shell (ulimit -a), memory, /dev/shm and the disk that RAY_TMPDIR or TMPDIR names",
    )


def _require_answer(address: str) -> bool:
    """Return whether ``address`` is a host's port, where something answers; Ray would try for minutes.

    Raises ConfigError if nothing does.
    """
    host, colon, port = address.removeprefix(_CLIENT).rpartition(":")
    if address.startswith(_CLIENT) and not colon:
        host, port = port, str(_CLIENT_PORT)
    if "://" in host or not port.isdecimal():
        return False
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()
    except (OSError, OverflowError) as exc:
        raise _no_cluster(address, exc) from exc
    return True


def _no_cluster(address: str, exc: Exception) -> ConfigError:
    return ConfigError(
        f"there is no Ray cluster at {address}",
        why=f"RAY_ADDRESS names it, and a connection failed: {exc or type(exc).__name__}",
        fix="start that cluster, and give this machine its token (RAY_AUTH_TOKEN_PATH) if it has one; or unset "
        "RAY_ADDRESS, with which the run starts a Ray of its own",
    )


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
