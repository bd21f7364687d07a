"""The driver's view of its processes: heartbeats, and log lines about long waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from hwrl.run.fleet.heartbeats import Heartbeats
from hwrl.run.fleet.wait_log import WaitLog
from hwrl.run.processes.handles import ActorHandle


class ProcessMonitor:
    """Watches the processes of a run by name. A silence of ``heartbeat_s`` seconds makes one unresponsive.

    With ``several_hosts``, log lines name the machine of a process.
    """

    def __init__(self, *, heartbeat_s: float, log: Callable[[str], None], several_hosts: bool = False) -> None:
        self._heartbeat_s, self._several_hosts = heartbeat_s, several_hosts
        self._heartbeats, self._wait_log = Heartbeats(), WaitLog(log)

    def watch(self, name: str, actor: ActorHandle) -> None:
        """Watch ``actor``, in place of an earlier one of the same name."""
        self._heartbeats.watch(name, actor)

    def forget(self, name: str) -> None:
        """Stop watching."""
        self._wait_log.forget(self.locate(name))
        self._heartbeats.forget(name)

    def waiting_for(self, subject: str) -> AbstractContextManager[None]:
        """Log that the run waits for ``subject`` if the block takes long."""
        return self._wait_log.waiting_for(subject)

    def update(self) -> None:
        """Exchange heartbeats and log long waits. Does not block; call it about every second."""
        self._heartbeats.update()
        silent = {self.locate(name): silent_s for name, silent_s in self._heartbeats.silent().items()}
        self._wait_log.update(silent, limit_s=self._heartbeat_s)

    def is_up(self, name: str) -> bool:
        """Return whether the process has answered once."""
        return self._heartbeats.is_up(name)

    def loop_turn_s(self, name: str) -> float:
        """Return for how many seconds the present turn of the process's loop has lasted."""
        return self._heartbeats.loop_turns().get(name, 0.0)

    def locate(self, name: str) -> str:
        """Return ``name`` with its machine, such as "replica-1 on host3"; only the name if that is not known."""
        host = self._heartbeats.host_of(name) if self._several_hosts else None
        return name if host is None else f"{name} on {host}"

    def unresponsive(self) -> dict[str, str]:
        """Return the processes that have been silent for too long, each with a sentence about it."""
        return {
            name: f"it has not answered for timeouts.heartbeat_s={self._heartbeat_s:g} s"
            for name, silent_s in self._heartbeats.silent().items()
            if silent_s > self._heartbeat_s
        }
