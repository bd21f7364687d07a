"""The faults of a chaos run: each begins on processes, links or hosts of the network, and is undone after its time."""

from __future__ import annotations

import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tests.faults.acts import MEMORY_GROUPS, build_machine_library, set_machine, starve
from tests.support.host_network import HostNetwork, NetworkHost
from tests.support.host_run import HostRun, command_of, return_to_cluster

CPUS = 4
_COMPILER = "cc"
_CLOCK_S, _SYNC_S = 7200.0, 0.5
_STARVED_NBYTES = 1 << 20
_LOOP_LOOK_S = 0.05
Undo = Callable[[], None]


@dataclass(frozen=True)
class Chaos:
    """The run and its hosts, and the source of random choices."""

    network: HostNetwork
    run: HostRun
    draw: random.Random

    @property
    def other(self) -> NetworkHost:
        """The host without the driver: the one that a run can lose."""
        return self.network.hosts[1]

    def pick(self, title: str) -> int | None:
        """Return one of the processes with ``title`` on any host; None if there are none at the moment."""
        pids = [pid for host in self.network.hosts for pid in host.processes() if title in command_of(pid)]
        return self.draw.choice(sorted(pids)) if pids else None


Act = Callable[[Chaos], Undo | None]
"""Begins a fault; returns how to end it, or None if it hit no process."""


def _send(pid: int | None, number: signal.Signals) -> bool:
    """Return whether the process got the signal."""
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
            return True
    return False


def _kill(title: str) -> Act:
    return lambda chaos: _nothing if _send(chaos.pick(title), signal.SIGKILL) else None


def _pause(title: str) -> Act:
    def act(chaos: Chaos) -> Undo | None:
        pid = chaos.pick(title)
        return (lambda: _wake(pid)) if _send(pid, signal.SIGSTOP) else None

    return act


def _crash_loop(chaos: Chaos) -> Undo | None:
    """Kill each replica of host1 as soon as it is there, until the fault is undone."""
    ended = threading.Event()

    def kill_all() -> None:
        while not ended.wait(_LOOP_LOOK_S):
            for pid in chaos.other.processes():
                if REPLICA in command_of(pid):
                    _send(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_all, name="crash loop")
    thread.start()

    def undo() -> None:
        ended.set()
        thread.join()

    return undo


def _starve(title: str) -> Act:
    """Leave one process no memory: the kernel kills it when it needs more."""

    def act(chaos: Chaos) -> Undo | None:
        pid = chaos.pick(title)
        name = f"hwrl-chaos-{pid}-{time.monotonic_ns()}"  # the same process may be hit twice
        return None if pid is None else starve(name, [pid], nbytes=_STARVED_NBYTES)

    return act


def _disturb(*, clock_s: float = 0.0, sync_s: float = 0.0) -> Act:
    """Set the clock of host1, or make its disk slow."""

    def act(chaos: Chaos) -> Undo:
        path = _machine_file(chaos.run.directory.parent, chaos.other)
        set_machine(path, clock_s=clock_s, sync_s=sync_s)
        return lambda: set_machine(path)

    return act


def _machine_file(work: Path, host: NetworkHost) -> Path:
    return work / f"machine-{host.name}"


def prepare_machines(network: HostNetwork, work: Path) -> None:
    """Let the clocks and the disks of the hosts be disturbed, if this machine has a compiler."""
    if shutil.which(_COMPILER) is None:
        return
    library = build_machine_library(work)
    for host in network.hosts:
        set_machine(_machine_file(work, host))
        host.environment = {"LD_PRELOAD": str(library), "HWRL_FAULT_MACHINE": str(_machine_file(work, host))}


def _wake(pid: int | None) -> None:
    _send(pid, signal.SIGCONT)


def _cut(chaos: Chaos) -> Undo:
    chaos.network.cut(chaos.other)
    return lambda: _bring_back(chaos)


def _halt(chaos: Chaos) -> Undo:
    chaos.other.halt()
    return lambda: _bring_back(chaos)


def _slow(chaos: Chaos) -> Undo:
    chaos.network.slow(chaos.other, mbit=2.0)
    return lambda: chaos.network.unslow(chaos.other)


def _bring_back(chaos: Chaos) -> None:
    """Join the host, or boot it; :func:`supervise` starts its Ray if that has ended."""
    if chaos.other.is_up:
        chaos.network.join(chaos.other)
    else:
        chaos.network.boot(chaos.other)


def supervise(chaos: Chaos) -> None:
    """Start Ray on a host without it, as a supervisor does. A node that was given up ends itself when it hears so."""
    for host in chaos.network.hosts:
        if not any(RAYLET in command_of(pid) for pid in host.processes()):
            return_to_cluster(chaos.network, host, cpus=CPUS)


def _nothing() -> None:
    """Undo a fault that cannot be undone."""


REPLICA, TRAINER, LEDGER, GCS, RAYLET = (
    *("ray::RolloutActor", "ray::TrainActor", "ray::LedgerActor"),
    *("/gcs/gcs_server ", "/raylet/raylet "),
)
FAULTS: dict[str, tuple[Act, float]] = {
    "kill a replica": (_kill(REPLICA), 0.0),
    "kill a trainer rank": (_kill(TRAINER), 0.0),
    "stop a replica for 3 s": (_pause(REPLICA), 3.0),
    "stop a replica for 15 s": (_pause(REPLICA), 15.0),
    "stop a trainer rank for 15 s": (_pause(TRAINER), 15.0),
    "stop the ledger for 3 s": (_pause(LEDGER), 3.0),
    "stop the GCS for 3 s": (_pause(GCS), 3.0),
    "stop a raylet for 3 s": (_pause(RAYLET), 3.0),
    "cut host1 off for 3 s": (_cut, 3.0),
    "cut host1 off for 15 s": (_cut, 15.0),
    "end host1, boot after 10 s": (_halt, 10.0),
    "host1 at 2 Mbit/s for 10 s": (_slow, 10.0),
    "host1's replicas crash for 15 s": (_crash_loop, 15.0),
    "a replica out of memory": (_starve(REPLICA), 10.0),
    "a trainer rank out of memory": (_starve(TRAINER), 10.0),
    "host1's clock 2 h ahead for 10 s": (_disturb(clock_s=_CLOCK_S), 10.0),
    "host1's disk slow for 15 s": (_disturb(sync_s=_SYNC_S), 15.0),
}
"""Each fault, and how many seconds it lasts."""


def possible_faults() -> list[str]:
    """Return the names of the faults that this machine permits."""
    lacking = [] if shutil.which(_COMPILER) else ["clock", "disk"]
    if not os.access(MEMORY_GROUPS, os.W_OK):
        lacking.append("out of memory")
    return [name for name in FAULTS if not any(word in name for word in lacking)]
