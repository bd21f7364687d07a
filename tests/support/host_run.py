"""A run of ``hwrl train`` on the Ray cluster of several hosts: :mod:`tests.support.host_network`."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hwrl.run.demo import write_demo
from tests.support.host_network import HostNetwork, NetworkHost
from tests.support.train_run import Run

QUICK_DEATH = {
    "RAY_health_check_initial_delay_ms": "3000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
}
"""Settings of the head: after about 10 s without an answer a node is lost. Ray's own limit is a minute."""


class HostRun(Run):
    """A run whose driver is on ``host``. Its actors are processes of the hosts, and have no mark of the run."""

    def __init__(self, host: NetworkHost, demo: Path, *words: str, log: str = "log", **env: str) -> None:
        self._host = host
        super().__init__(demo, *words, log=log, **env)

    def place(self, command: list[str]) -> list[str]:
        return self._host.inside(*command)


@contextmanager
def ray_hosts(*, count: int, cpus: int, prompts: int, dashboard: bool = False) -> Iterator[tuple[HostNetwork, Path]]:
    """Yield hosts with a Ray cluster, and a directory with the demo that all of them see."""
    with tempfile.TemporaryDirectory(prefix="h") as directory:
        work = Path(directory)
        write_demo(work, seed=1, prompts=prompts)
        with HostNetwork(work / "hosts", count=count, shared=[work]) as network:
            for host in network.hosts:
                network.start_ray(host, cpus=cpus, dashboard=dashboard, **QUICK_DEATH)
            yield network, work


def actors_on(host: NetworkHost, title: str = "ray::") -> list[int]:
    """Return the run's actors on ``host`` with a title like ``ray::RolloutActor``."""
    return [pid for pid in host.processes() if command_of(pid).startswith(title)]


def command_of(pid: int) -> str:
    """Return the command line of a process; an empty text if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def wait_until(condition: Callable[[], bool], *, timeout_s: float, otherwise: Callable[[], str]) -> float:
    """Wait for ``condition``; return the seconds. Fails after ``timeout_s`` with the text of ``otherwise``."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() < began_s + timeout_s, otherwise()
        time.sleep(0.05)
    return time.monotonic() - began_s


def return_to_cluster(network: HostNetwork, host: NetworkHost, *, cpus: int) -> None:
    """Start Ray on a host that the cluster has given up, as a supervisor of machines does."""
    if not host.is_up:
        network.boot(host)
    else:
        for pid in host.processes():
            os.kill(pid, 9)
    network.start_ray(host, cpus=cpus, **QUICK_DEATH)
