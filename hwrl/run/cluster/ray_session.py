"""Ray for the duration of a run: join a cluster, or start a private Ray on this machine and end it afterwards."""

from __future__ import annotations

import itertools
import logging
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import ray

from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, EngineError, attempt_all, first_line, in_one_line
from hwrl.run.cluster.placement import has_devices, plan_placement
from hwrl.run.cluster.ray_security import admits_without_token, check_security, has_token, private_ray, secured
from hwrl.run.config import Config
from hwrl.run.inputs import is_local

_TOKEN_ADVICE_LOGGER = "ray._private.authentication.authentication_token_setup"
"""Ray logs advice here on how to disable authentication by token. We hide it, because the run has chosen the token."""
_CLIENT_SCHEME = "ray://"
_CLIENT_PORT = 10001
_SHUTDOWN_LOG_S = 10.0
_SHUTDOWN_LOGS_BEFORE_KILL = 3

RETRY_PAUSES_S = (2.0, 10.0, 30.0)
"""The pauses before further tries to start Ray. Its raylet gives Ray's agents 15 s, and no setting of Ray 2.60 changes
that. A busy machine may need more; a later try finds their files in memory.
"""
_RAYLET_ERROR = re.compile(r"^\[.* [EFC] \d+ \d+\] \(raylet\) \S+ +(?:.*Check failed: \S+ )?(.*)$", re.MULTILINE)
_SHOWN_CHARACTERS = 300
_BUSY = 2.0
"""The load for each core from which a machine is called busy."""

_UNUSED_STARTS = ("start_monitor", "start_api_server", "start_log_monitor")
"""The methods of Ray's Node that start its autoscaler, its web server, and its reader of logs."""

_starting = False
"""Whether this process is currently starting Ray."""


@contextmanager
def ray_cluster(config: Config, *, log: Callable[[str], None]) -> Iterator[None]:
    """Join the cluster at RAY_ADDRESS, or start a Ray on this machine with resources for all actors of the run.

    A started Ray has its own process groups. So a signal to the group of this process, from timeout(1) or a job
    manager, does not reach Ray, and the run can still save a checkpoint. Ray ends when this process ends, for whatever
    reason, but two of its agents may take another minute.
    """
    with _start(config, log=log) if is_local() else _join(config, log=log):
        try:
            yield
        except BaseException as error:
            attempt_all(partial(_end_ray, log), after=error)
            raise
        _end_ray(log)


# -- the end --------------------------------------------------------------------------------------------------------


def _end_ray(log: Callable[[str], None]) -> None:
    """Disconnect from Ray, and end it if this process started it. Blocks; logs if that takes long.

    Ray waits for its own processes, and some may be frozen. After a while this kills Ray's processes among the children
    of this process.
    """
    ended = threading.Event()
    threading.Thread(target=_watch_shutdown, args=[ended, log], name="end of Ray", daemon=True).start()
    try:
        ray.shutdown()
    except OSError as exc:
        raise EngineError(
            "Ray did not end cleanly",
            why=str(exc),
            fix="kill the remaining processes named raylet and gcs_server; check the limits (ulimit -a)",
        ) from exc
    finally:
        ended.set()


def _watch_shutdown(ended: threading.Event, log: Callable[[str], None]) -> None:
    for count in itertools.count(1):
        if ended.wait(_SHUTDOWN_LOG_S):
            return
        log(f"waiting for the end of Ray's processes for {count * _SHUTDOWN_LOG_S:g} s")
        if count == _SHUTDOWN_LOGS_BEFORE_KILL:
            _kill_children()


def _kill_children() -> None:
    for pid in children_of_ray():
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def children_of_ray(proc: Path = Path("/proc")) -> list[int]:
    """Return the children of this process that belong to Ray: raylet, GCS and their helpers.

    A thread or a child that ends before its file under ``proc`` is read is left out.
    """
    children: list[int] = []
    for task in (proc / "self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            children += [int(pid) for pid in (task / "children").read_text().split()]
    of_ray = []
    for pid in children:
        with suppress(FileNotFoundError, ProcessLookupError):
            of_ray += [pid] if b"/ray/" in (proc / f"{pid}/cmdline").read_bytes() else []
    return of_ray


# -- a private Ray on this machine ----------------------------------------------------------------------------------


@contextmanager
def _start(config: Config, *, log: Callable[[str], None]) -> Iterator[None]:
    plan_placement(config, get_backend(), devices=local_devices(config), one_machine=True)  # raises before Ray starts
    log("starting Ray on this machine")
    with private_ray() as directory:
        for pause_s in (*RETRY_PAUSES_S, None):
            try:
                with _own_process_groups(), _without_token_advice(), few_processes():
                    _connect(
                        config, address="local", include_dashboard=False, _temp_dir=str(directory), **_resources(config)
                    )
                break
            except Exception as exc:
                ray.shutdown()
                _kill_children()  # the parts that have started
                said = raylet_error(directory)
                if pause_s is None or not was_slow(exc, said):
                    raise not_started(exc, said, file_limit=resource.getrlimit(resource.RLIMIT_FSIZE)[0]) from exc
                log(f"Ray did not start ({said or first_line(exc)}); trying again in {pause_s:g} s{_load()}")
                time.sleep(pause_s)
        if not ray.nodes()[0]["NodeManagerAddress"].startswith("127."):
            log("warning: this version of Ray listens on all interfaces; only its token keeps others out")
        yield


def raylet_error(directory: Path) -> str:
    """Return the last error in the log of the newest raylet under ``directory``, in one line; "" without one."""
    try:
        text = (directory / "session_latest/logs/raylet.out").read_text(errors="replace")
    except OSError:
        return ""
    return next((line.strip()[:_SHOWN_CHARACTERS] for line in reversed(_RAYLET_ERROR.findall(text))), "")


def was_slow(exc: Exception, said: str) -> bool:
    """Return whether a start of Ray failed by a time limit: of the raylet, which ``said`` so, or of ray.init."""
    return "timed out" in (said or str(exc)).lower()


def _load() -> str:
    """Return what the load of this machine is, as a further part of a sentence; "" if it is not busy."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    return f"; this machine is busy: its load is {load:.0f}, on {cores} core(s)" if load > _BUSY * cores else ""


def not_started(exc: Exception, said: str, *, file_limit: int) -> EngineError:
    """Return the error about a failed start of Ray. ``said`` is the raylet's error, "" without one.

    ``file_limit`` is the limit on the size of a file, in bytes.
    """
    reason = f"{in_one_line(exc)}{f'; the raylet said: {said}' if said else ''}{_load()}"
    if file_limit != resource.RLIM_INFINITY:
        reason += f"; a file can have at most {file_limit:,} bytes here (ulimit -f), and Ray's object store is one file"
        fix = "run `ulimit -f unlimited` first"
    elif was_slow(exc, said) and _load():
        fix = "start the run again when the machine is less busy (uptime shows its load)"
    else:
        fix = "check the limits of this shell (ulimit -a), memory, /dev/shm and the disk of RAY_TMPDIR or TMPDIR"
    return EngineError("Ray did not start on this machine", why=reason, fix=fix)


def local_devices(config: Config) -> int:
    """Return the number of devices on this machine. Without devices: of processes that the machine is said to hold."""
    if has_devices(get_backend()):
        return get_backend().device_count()
    return max(config.train.ranks + config.rollout.replicas * config.rollout.tensor_parallel, os.cpu_count() or 1)


def _resources(config: Config) -> dict[str, Any]:
    """Return this machine's resources for Ray, because Ray itself finds the devices of only some vendors."""
    devices, count = get_backend().devices, local_devices(config)
    resources = {} if devices.ray_resource is None else devices.ray_options(count)
    return resources | {"num_cpus": max(count, os.cpu_count() or 1)}


@contextmanager
def _own_process_groups() -> Iterator[None]:
    """Put each process that is forked in this block into its own process group.

    Ray starts its processes with Popen and a preexec_fn, so Python forks and calls the fork hooks. One of them sets the
    group. Remove this when ray.init has an option for it.
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
def few_processes() -> Iterator[None]:
    """Make Ray start without its autoscaler, web server and log reader. A run on one machine does not use them.

    They would take two seconds of CPU time at the start, and memory during the whole run. ``include_dashboard=False``
    omits only the pages of the web server. If a version of Ray does not have these private methods, it starts all its
    processes. Remove this when ray.init has options for them.
    """
    node = getattr(ray._private.node, "Node", object)
    before = {name: vars(node)[name] for name in _UNUSED_STARTS if name in vars(node)}
    for name in before:
        setattr(node, name, lambda node, **options: None)
    try:
        yield
    finally:
        for name, start in before.items():
            setattr(node, name, start)


# -- a cluster ------------------------------------------------------------------------------------------------------


@contextmanager
def _join(config: Config, *, log: Callable[[str], None]) -> Iterator[None]:
    address = os.environ["RAY_ADDRESS"]
    log(f"joining the Ray cluster {address}")
    with secured(config.cluster_security):
        is_open = _is_open(address)
        check_security(config.cluster_security, address, is_open=is_open)
        try:
            with _without_token_advice():
                _connect(config)
        except Exception as exc:
            raise _no_cluster(address, exc) from exc
        if is_open or not has_token():
            log(
                f"warning: the Ray cluster {address} has no authentication: anyone with access to its ports can run "
                "code as its user, read this run's data and end it; start its nodes with RAY_AUTH_MODE=token"
            )
        yield


def _is_open(address: str) -> bool | None:
    """Return whether the cluster admits clients without a token; None if ``address`` is not a host and port."""
    if not _check_port(address) or _CLIENT_SCHEME in address:
        return None
    try:
        return admits_without_token(address)
    except Exception as exc:
        raise _no_cluster(address, exc) from exc


def _check_port(address: str) -> bool:
    """Return whether something listens at ``address``. Ray itself would try to connect for minutes.

    Returns False if ``address`` is not a host and port. Raises ConfigError if nothing accepts the connection.
    """
    host, colon, port = address.removeprefix(_CLIENT_SCHEME).rpartition(":")
    if address.startswith(_CLIENT_SCHEME) and not colon:
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
        "RAY_ADDRESS: the run then starts its own Ray",
    )


# -- ray.init -------------------------------------------------------------------------------------------------------


def _connect(config: Config, **options: Any) -> None:
    with _kept_signal_handlers():
        ray.init(log_to_driver=False, configure_logging=False, namespace=f"hwrl-{config.dir.name}", **options)


@contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Keep this process's signal handlers. ray.init would set one for SIGTERM that exits from anywhere in the program.

    Remove this when ray.init has an option for it.
    """

    def keep(signalnum: int, handler: Any) -> Any:
        return signal.getsignal(signalnum)

    real, signal.signal = signal.signal, keep
    try:
        yield
    finally:
        signal.signal = real


@contextmanager
def _without_token_advice() -> Iterator[None]:
    logger = logging.getLogger(_TOKEN_ADVICE_LOGGER)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
