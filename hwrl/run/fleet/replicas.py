"""The rollout replicas of a run: start them, set them up, and restart the dead and the hanging ones."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayTaskError

from hwrl.errors import EngineError, HwrlError, InputChangedError
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import HeldDevices
from hwrl.run.config import Config
from hwrl.run.fleet.monitor import ProcessMonitor
from hwrl.run.fleet.run_ledger import RunLedger
from hwrl.run.fleet.spread_evaluation import SpreadEvaluation
from hwrl.run.processes.actors import ProcessSetup
from hwrl.run.processes.answers import DEATHS, Answer, first_line, value_of, why_died, why_ended
from hwrl.run.processes.handles import ReplicaHandle

_TRANSFERS_IN_A_TURN = 4
"""The most transfers in one turn of a rollouter's loop."""
_SEEDS = 1 << 31
"""The number of seeds that every library accepts."""


@dataclass(frozen=True)
class _Replica:
    handle: ReplicaHandle
    replica_id: str  # of this life alone, in the ledger
    is_replacement: bool  # the device may stay full for a while after the death of the one before
    started_s: float
    run: Answer[None] | None = None  # None while it is being set up


class Replicas:
    """Starts the replicas, and restarts dead ones under their old names, up to ``rollout.max_restarts`` times.

    A replica is set up first, and then runs until the end. Each of the ``answers`` is an event when it is ready: pass
    it to :meth:`handle_event`.
    """

    def __init__(
        self,
        config: Config,
        *,
        devices: RunDevices,
        ledger: RunLedger,
        monitor: ProcessMonitor,
        setup_of: Callable[[str], ProcessSetup],
        seed: int,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._devices, self._ledger, self._monitor = config, devices, ledger, monitor
        self._setup_of, self._seed, self._log = setup_of, seed, log
        self._replicas: dict[str, _Replica] = {}
        self._set_ups: dict[Answer[HeldDevices | None], str] = {}
        self._starts = 0
        self._evaluation: SpreadEvaluation | None = None
        self._refusal: InputChangedError | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    # -- events ----------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> list[Answer[Any]]:
        """The answers of all replicas that are set up, run or evaluate. Each means an event when it is ready."""
        return [*self._running(), *self._set_ups, *(self._evaluation.answers if self._evaluation is not None else ())]

    @property
    def are_being_set_up(self) -> bool:
        """Whether a replica is still being set up."""
        return bool(self._set_ups)

    def handle_event(self, answer: Answer[Any]) -> None:
        """Let a replica run when it is set up, or restart an ended one. Ignores answers of other processes."""
        running = self._running()
        if answer in running:
            self.restart(running[answer], why_ended(answer))
        elif answer in self._set_ups:
            self._finish_set_up(answer)
        elif self._evaluation is not None:
            self._evaluation.poll()

    def _running(self) -> dict[Answer[Any], str]:
        return {replica.run: name for name, replica in self._replicas.items() if replica.run is not None}

    def _finish_set_up(self, answer: Answer[HeldDevices | None]) -> None:
        """Let the replica run. After a death it restarts; another error of a first replica ends the run."""
        name = self._set_ups.pop(answer)
        replica = self._replicas[name]
        try:
            self._devices.check_report(name, value_of(answer))
        except DEATHS as exc:
            self.restart(name, why_died(exc))
            return
        except (HwrlError, RayTaskError) as exc:
            if not replica.is_replacement:
                raise
            if isinstance(exc, InputChangedError):
                self._refusal = exc
                self._remove(name)  # it is neither late nor silent, and must not restart: the run ends soon
                return
            self.restart(name, f"it could not be set up in another's place: {first_line(exc)}")
            return
        self._replicas[name] = dataclasses.replace(replica, run=replica.handle.run())

    # -- start and restart -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all replicas. Does not wait for them."""
        for name in self._devices.replicas:
            self._start(name)

    def _start(self, name: str) -> None:
        """Start the replica ``name``. Its prompts and metrics belong to its replica id.

        A replacement has the name of the dead replica, so that a weight transfer stops waiting for the dead one.
        """
        start, self._starts = self._starts, self._starts + 1
        replica_id = f"{name}#{start}"
        handle = ReplicaHandle(**self._devices.ray_options(name))
        is_replacement = start >= self._config.rollout.replicas
        self._replicas[name] = _Replica(handle, replica_id, is_replacement=is_replacement, started_s=time.monotonic())
        self._monitor.watch(name, handle)
        set_up = handle.set_up(
            self._setup_of(name),
            replica=name,
            replica_id=replica_id,
            seed=(self._seed + 1009 * start) % _SEEDS,
            ledger=self._ledger.handle,
        )
        self._set_ups[set_up] = name

    def restart(self, name: str, reason: str) -> None:
        """End the replica ``name`` and start a new one. Raises EngineError after ``rollout.max_restarts`` deaths."""
        place = self._monitor.locate(name)
        lost = self._remove(name)
        self._log(f"rollout {place} ended ({reason}); {lost} prompts go to others, a new replica starts")
        deaths = self._starts - self._config.rollout.replicas + 1
        if deaths > self._config.rollout.max_restarts:
            raise EngineError(
                f"rollout replicas died {deaths} times",
                why=reason,
                fix="remove the cause, or raise rollout.max_restarts; resume=true continues the run",
            )
        self._start(name)

    def _remove(self, name: str) -> int:
        """End the replica ``name``; return the number of its prompts, which go to others."""
        replica = self._replicas.pop(name)
        self._devices.forget(name)
        self._set_ups = {answer: other for answer, other in self._set_ups.items() if other != name}
        self._monitor.forget(name)
        replica.handle.kill()
        return self._ledger.forget(replica.replica_id)

    def restart_late(self) -> None:
        """Restart the replicas without progress. They may still answer heartbeats."""
        for name, reason in self._expire_late().items():
            self.restart(name, reason)

    def _expire_late(self) -> dict[str, str]:
        """Take back overdue prompts; return all replicas without progress, each with its exceeded limit."""
        late, now_s = {}, time.monotonic()
        start_s, group_s = self._config.timeouts.start_s, self._config.rollout.group_timeout_s
        turn_s = group_s + _TRANSFERS_IN_A_TURN * (group_s + self._config.weights.timeout_s)
        overdue = self._ledger.expire_overdue()
        for name, replica in self._replicas.items():
            if replica.replica_id in overdue:
                late[name] = f"it made no progress on a prompt for rollout.group_timeout_s={group_s:g}"
            elif replica.run is None and now_s - replica.started_s > start_s:
                late[name] = f"it was not set up within timeouts.start_s={start_s:g}"
            elif self._monitor.loop_turn_s(name) > turn_s:
                late[name] = f"one turn of its loop has lasted for {self._monitor.loop_turn_s(name):.0f} s"
        if self._evaluation is not None:
            self._evaluation.poll()
            reasons = self._evaluation.late()
            late |= {
                name: reasons[replica.replica_id]
                for name, replica in self._replicas.items()
                if replica.replica_id in reasons
            }
        return late

    # -- changed inputs --------------------------------------------------------------------------------------------

    @property
    def refused(self) -> bool:
        """Whether a replacement found a changed input. No restart can fix this, so the run must end."""
        return self._refusal is not None

    def raise_refusal(self) -> None:
        """Raise the error of the changed input, if there is one.

        Call it only while the trainers are idle and no batch is on its way: the run then still saves a checkpoint.
        """
        if self._refusal is not None:
            raise self._refusal

    # -- calls -----------------------------------------------------------------------------------------------------

    def evaluate(self) -> SpreadEvaluation | None:
        """Let the running replicas share an evaluation; return None if no replica runs. Does not block."""
        if not self._running_handles():
            return None
        self._evaluation = SpreadEvaluation(self._running_handles, limit_s=self._config.timeouts.evaluation_s)
        return self._evaluation

    def _running_handles(self) -> dict[str, ReplicaHandle]:
        return {replica.replica_id: replica.handle for replica in self._replicas.values() if replica.run is not None}

    def begin_stop(self) -> list[Answer[None]]:
        """Tell all replicas to stop; return the answers to wait for."""
        for replica in self._replicas.values():
            replica.handle.stop()
        return [replica.run for replica in self._replicas.values() if replica.run is not None]

    def kill(self) -> None:
        """End the processes."""
        for replica in self._replicas.values():
            replica.handle.kill()
