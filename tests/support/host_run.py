"""A run of ``hwrl train`` on the Ray cluster of several hosts: :mod:`tests.support.host_network`."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


_ACTORS = ("ray::TrainActor", "ray::RolloutActor", "ray::LedgerActor")
STEPS_AFTER = 4
"""More steps than the pipeline is ahead of the trainer: they have all prompts that were under way."""


class HostRun(Run):
    """A run whose driver is on ``host``. Its actors are processes of the hosts, and have no mark of the run."""

    def __init__(self, host: NetworkHost, demo: Path, *words: str, log: str = "log", **env: str) -> None:
        self._host = host
        super().__init__(demo, *words, log=log, **{**host.environment, **env})

    def place(self, command: list[str]) -> list[str]:
        return self._host.inside(*command)


@contextmanager
def ray_hosts(
    *,
    count: int,
    cpus: int,
    prompts: int,
    dashboard: bool = False,
    prepare: Callable[[HostNetwork, Path], None] = lambda network, work: None,
) -> Iterator[tuple[HostNetwork, Path]]:
    """Yield hosts with a Ray cluster, and a directory with the demo that all of them see.

    ``prepare(network, directory)`` is called before Ray starts on the hosts.
    """
    with tempfile.TemporaryDirectory(prefix="h") as directory:
        work = Path(directory)
        write_demo(work, seed=1, prompts=prompts)
        with HostNetwork(work / "hosts", count=count, shared=[work]) as network:
            prepare(network, work)
            for host in network.hosts:
                network.start_ray(host, cpus=cpus, dashboard=dashboard, settings=QUICK_DEATH)
            yield network, work


def actors_on(host: NetworkHost) -> list[int]:
    """Return the run's actors on ``host``. Ray has agents of its own with similar titles."""
    return [pid for pid in host.processes() if command_of(pid).startswith(_ACTORS)]


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


def finish(network: HostNetwork, work: Path, run: HostRun, words: list[str], *, timeout_s: float = 1500.0) -> HostRun:
    """End ``run`` by SIGTERM, and continue it for a few steps to its end; return the continuation.

    A prompt that was under way at the signal is trained on by the continuation.
    """
    stop_driver(network)
    status = run.wait(timeout_s=timeout_s)
    assert status == 130, f"it ended with status {status}"
    steps = int(run.metrics()[-1]["step"]) + STEPS_AFTER
    again = HostRun(
        network.hosts[0], work, *words, f"train.steps={steps}", "resume=true", log="log-2", **network.environment
    )
    try:
        status = again.wait(timeout_s=timeout_s)
        assert status == 0, f"its continuation ended with status {status}:\n{again.output()}"
    finally:
        again.close()
    return again


def stop_driver(network: HostNetwork) -> None:
    """Send SIGTERM to the driver, as a user does."""
    for pid in network.hosts[0].processes():
        if "hwrl train" in command_of(pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def wait_until_no_actors(network: HostNetwork) -> None:
    """Return when no actor is left on any host. Fails after 30 s."""
    wait_until(
        lambda: not any(actors_on(host) for host in network.hosts),
        timeout_s=300.0,
        otherwise=lambda: f"left: {[command_of(pid) for host in network.hosts for pid in actors_on(host)]}",
    )


def return_to_cluster(network: HostNetwork, host: NetworkHost, *, cpus: int) -> None:
    """Boot a host that the cluster has given up, and start Ray on it, as a supervisor of machines does."""
    host.halt()
    network.boot(host)
    network.start_ray(host, cpus=cpus, settings=QUICK_DEATH)
