"""The driver's monitor of its processes: heartbeats, and log lines about long waits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from hwrl.run.fleet.heartbeats import Heartbeats
from hwrl.run.fleet.wait_log import WaitLog
from hwrl.run.processes.handles import ActorHandle

_MOST_WARNINGS = 500
"""The maximum number of warnings in the log of a run."""


class ProcessMonitor:
    """Watches the processes of a run by name. A process is unresponsive if it does not answer for ``heartbeat_s``.

    With ``names_hosts``, log lines include the machine of each process. ``warn`` logs the warnings of the processes,
    each once, however many of them have it.
    """

    def __init__(
        self,
        *,
        heartbeat_s: float,
        log: Callable[[str], None],
        warn: Callable[[str], None],
        names_hosts: bool = False,
    ) -> None:
        self._heartbeat_s, self._names_hosts = heartbeat_s, names_hosts
        self._warn = warn
        self._warned: set[str] = set()
        self._heartbeats, self._wait_log = Heartbeats(), WaitLog(log)

    def watch(self, name: str, actor: ActorHandle) -> None:
        """Watch ``actor``, in place of an earlier one of the same name."""
        self._heartbeats.watch(name, actor)

    def forget(self, name: str) -> None:
        """Stop watching the process ``name``."""
        self._wait_log.forget(self.locate(name))
        self._heartbeats.forget(name)

    def waiting_for(self, subject: str) -> AbstractContextManager[None]:
        """Log that the run is waiting for ``subject`` if the block takes long."""
        return self._wait_log.waiting_for(subject)

    def note_progress(self) -> None:
        """Note that the run shows its progress now: a wait is no longer logged for want of other lines."""
        self._wait_log.note_progress()

    def update(self) -> None:
        """Read and send heartbeats, and log long waits. Does not block; call it about every second."""
        self._heartbeats.update()
        self._log_warnings()
        silent = {self.locate(name): silent_s for name, silent_s in self._heartbeats.silent().items()}
        self._wait_log.update(silent, limit_s=self._heartbeat_s)

    def finish(self) -> None:
        """Log the last warnings of the processes that answer within a second. Call it before they end."""
        self._heartbeats.finish()
        self._log_warnings()

    def _log_warnings(self) -> None:
        found, self._heartbeats.warnings = self._heartbeats.warnings, []
        for name, text in found:
            if text not in self._warned and len(self._warned) <= _MOST_WARNINGS:
                self._warned.add(text)
                is_last = len(self._warned) > _MOST_WARNINGS
                self._warn("further warnings are not shown" if is_last else f"warning: {self.locate(name)}: {text}")

    def is_up(self, name: str) -> bool:
        """Return whether the process has answered a heartbeat: its start is over."""
        return self._heartbeats.is_up(name)

    def loop_turn_s(self, name: str) -> float:
        """Return the seconds that the process's loop has spent in its current turn, by the newest heartbeat."""
        return self._heartbeats.loop_turns().get(name, 0.0)

    def locate(self, name: str) -> str:
        """Return ``name`` with its machine, such as "replica-1 on host3"; only ``name`` if the machine is not known."""
        host = self._heartbeats.host_of(name) if self._names_hosts else None
        return name if host is None else f"{name} on {host}"

    def unresponsive(self) -> dict[str, str]:
        """Return the processes that have not answered for too long, each with the reason as text."""
        return {
            name: f"it has not answered for timeouts.heartbeat_s={self._heartbeat_s:g} s"
            for name, silent_s in self._heartbeats.silent().items()
            if silent_s > self._heartbeat_s
        }
