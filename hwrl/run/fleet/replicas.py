"""The rollout replicas of a run: start them, set them up, restart dead and hanging ones, add and remove some."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import RayTaskError

from hwrl.errors import EngineError, HwrlError, InputChangedError, first_line
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceReport
from hwrl.run.config import Config
from hwrl.run.fleet.monitor import ProcessMonitor
from hwrl.run.fleet.restarts import RestartPlan
from hwrl.run.fleet.run_ledger import DriverLedger
from hwrl.run.fleet.sharded_evaluation import ShardedEvaluation
from hwrl.run.processes.actors import ForgottenReplica, ProcessSetup
from hwrl.run.processes.answers import DEATH_ERRORS, Answer, value_of, why_died, why_ended
from hwrl.run.processes.handles import ReplicaHandle
from hwrl.run.report import EventLog

_TRANSFERS_IN_A_TURN = 4
"""The most transfers in one turn of a rollouter's loop."""
_SEEDS = 1 << 31
"""The number of seeds that every library accepts."""


@dataclass(frozen=True)
class _Replica:
    handle: ReplicaHandle
    replica_id: str  # of this life alone, in the ledger
    is_initial: bool  # it began with the run: an error while it is set up ends the run
    started_s: float
    run: Answer[None] | None = None  # None while it is being set up
    is_leaving: bool = False


class Replicas:
    """Starts the replicas, and restarts dead ones under their old names, as :class:`RestartPlan` says.

    A replica is set up first, and then runs until the end, or until :meth:`scale` lets it leave. Each of the
    ``answers`` is an event when it is ready: pass it to :meth:`handle_event`. A replica that dies
    ``rollout.max_restarts`` + 1 times in a row is given up. The run goes on while ``rollout.min_replicas`` are left.

    ``withdraw`` gets the name of each replica that has ended: no weight transfer waits for it after that.
    """

    def __init__(
        self,
        config: Config,
        *,
        devices: RunDevices,
        ledger: DriverLedger,
        monitor: ProcessMonitor,
        setup_of: Callable[[str], ProcessSetup],
        seed: int,
        withdraw: Callable[[str], None],
        log: EventLog,
    ) -> None:
        self._config, self._devices, self._ledger, self._monitor = config, devices, ledger, monitor
        self._setup_of, self._seed, self._withdraw = setup_of, seed, withdraw
        self._log = partial(log, kind="replica")
        self._log_scale = partial(log, kind="scale")
        self._restarts = RestartPlan(config.rollout.max_restarts)
        self._wanted: list[str] = []  # the names of all replicas that shall run
        self._least = config.rollout.min_replicas or config.rollout.replicas
        self._replicas: dict[str, _Replica] = {}
        self._starting: dict[Answer[DeviceReport | None], str] = {}
        self._starts = 0
        self._evaluation: ShardedEvaluation | None = None
        self._changed_input: InputChangedError | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    # -- events ----------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> list[Answer[Any]]:
        """The answers of all replicas that are set up, run or evaluate. Each means an event when it is ready."""
        return [*self._running(), *self._starting, *(self._evaluation.answers if self._evaluation is not None else ())]

    @property
    def are_starting(self) -> bool:
        """Whether a replica is still being set up."""
        return bool(self._starting or self._restarts.paused)

    def handle_event(self, answer: Answer[Any]) -> None:
        """Let a replica run when it is set up, or restart an ended one. Ignores answers of other processes."""
        running = self._running()
        if answer in running:
            self.handle_exit(running[answer], why_ended(answer))
        elif answer in self._starting:
            self._finish_set_up(answer)
        elif self._evaluation is not None:
            self._evaluation.poll()

    def _running(self) -> dict[Answer[Any], str]:
        return {replica.run: name for name, replica in self._replicas.items() if replica.run is not None}

    def _finish_set_up(self, answer: Answer[DeviceReport | None]) -> None:
        """Let the replica run. After a death it restarts; another error of one of the first replicas ends the run."""
        name = self._starting.pop(answer)
        replica = self._replicas[name]
        try:
            self._devices.check_report(name, value_of(answer))
        except DEATH_ERRORS as exc:
            self.handle_exit(name, why_died(exc))
            return
        except (HwrlError, RayTaskError) as exc:
            if replica.is_initial:
                raise
            if isinstance(exc, InputChangedError):
                self._changed_input = exc
                self._remove(name)  # it is neither late nor silent, and must not restart: the run ends soon
                return
            self.handle_exit(name, f"it could not be set up: {first_line(exc)}")
            return
        self._replicas[name] = dataclasses.replace(replica, run=replica.handle.run())
        if not replica.is_initial:
            took_s = time.monotonic() - replica.started_s
            self._log_scale(f"rollout {name} has joined after {took_s:.1f} s; {len(self._running())} replicas run")

    # -- start and restart -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all replicas. Does not wait for them."""
        self._wanted = list(self._devices.replicas)
        for name in self._wanted:
            self._start(name, is_initial=True)

    def _start(self, name: str, *, is_initial: bool = False) -> None:
        """Start the replica ``name``. Its prompts and metrics belong to its replica id."""
        start, self._starts = self._starts, self._starts + 1
        replica_id = f"{name}#{start}"
        handle = ReplicaHandle(**self._devices.ray_options(name))
        self._replicas[name] = _Replica(handle, replica_id, is_initial=is_initial, started_s=time.monotonic())
        self._monitor.watch(name, handle)
        set_up = handle.set_up(
            self._setup_of(name),
            replica=name,
            replica_id=replica_id,
            seed=(self._seed + 1009 * start) % _SEEDS,
            ledger=self._ledger.handle,
        )
        self._starting[set_up] = name

    def handle_exit(self, name: str, reason: str) -> None:
        """End the replica ``name`` and start a new one, at once or after a pause; one that was leaving has left.

        Raises EngineError if it is given up, and too few replicas are left.
        """
        replica = self._replicas[name]
        place = self._monitor.locate(name)
        lost, finished = self._remove(name)
        if replica.is_leaving:
            self._devices.remove_replica(name)
            running = len(self._running())
            self._log_scale(f"rollout {place} has left ({reason}); {lost} prompts go to others; {running} replicas run")
            return
        ended = f"rollout {place} ended ({reason}); {lost} prompts go to others"
        pause_s = self._restarts.add_death(name, finished=finished)
        if pause_s is None:
            self._give_up(name, reason, ended)
            return
        self._log(f"{ended}, a new replica starts{f' in {pause_s:g} s' if pause_s else ''}")
        self.start_pending()

    def start_pending(self) -> None:
        """Start the replicas whose pause after a death is over."""
        for name in self._restarts.take_due():
            self._start(name)

    def _give_up(self, name: str, reason: str, ended: str) -> None:
        """Go on without ``name``. Raises EngineError if too few replicas are left."""
        self._wanted.remove(name)
        self._devices.remove_replica(name)
        restarts = self._config.rollout.max_restarts
        deaths = f"{restarts + 1} times in a row" if restarts else "once"
        if len(self._wanted) < self._least:
            raise EngineError(
                f"rollout {name} died {deaths}{', and finished no prompt in between' if restarts else ''}",
                why=reason,
                fix="remove the cause, or raise rollout.max_restarts; with rollout.min_replicas the run goes on with "
                "fewer replicas; resume=true continues the run",
            )
        self._log_scale(f"{ended}; it died {deaths} and is given up: {len(self._wanted)} are left")

    def _remove(self, name: str) -> ForgottenReplica:
        """End the replica ``name``; its prompts go to others."""
        replica = self._replicas.pop(name)
        self._devices.forget(name)
        self._starting = {answer: other for answer, other in self._starting.items() if other != name}
        self._monitor.forget(name)
        replica.handle.kill()
        self._withdraw(name)
        return self._ledger.forget(replica.replica_id)

    # -- joining and leaving ---------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The number of replicas that shall run: those that run, start, or wait for a restart."""
        return len(self._wanted)

    def scale(self, count: int) -> str:
        """Let replicas join or leave until ``count`` are wanted; return a sentence about it. Does not block.

        A new replica builds its model while the others go on, and then gets the newest weights. A leaving one finishes
        its prompts, and leases no more. Raises ConfigError, and changes nothing, if there are too few devices.
        """
        before = len(self._wanted)
        self._least = min(self._least, count)
        if count > before:
            return self._add(count - before)
        names = sorted(self._wanted, key=lambda name: (self._is_running(name), -self._wanted.index(name)))
        for name in names[: before - count]:
            self._let_leave(name)
        gone = ", ".join(name for name in names[: before - count] if name not in self._replicas)
        leaving = ", ".join(name for name in names[: before - count] if name in self._replicas)
        told = [f"{gone} left at once"] if gone else []
        told += [f"{leaving} will leave when their prompts are finished"] if leaving else []
        return "; ".join(told) or f"{count} replicas are already there"

    def _add(self, count: int) -> str:
        taken = {*self._replicas, *self._wanted}
        names = [name for name in map("replica-{}".format, range(len(taken) + count)) if name not in taken][:count]
        self._devices.check_growth()
        for done, name in enumerate(names):
            try:
                self._devices.add_replica(name)
            except HwrlError:
                for other in names[:done]:
                    self._devices.remove_replica(other)
                raise
        waiting = self._devices.count_waiting(names)
        for name in names:
            self._wanted.append(name)
            self._restarts.forget(name)
            self._start(name)
        waits = f"; {waiting} of them wait until Ray has devices for them" if waiting else ""
        return f"{', '.join(names)} will join when their models are built{waits}"

    def _let_leave(self, name: str) -> None:
        self._wanted.remove(name)
        self._restarts.forget(name)
        if self._is_running(name):
            replica = self._replicas[name] = dataclasses.replace(self._replicas[name], is_leaving=True)
            replica.handle.leave()
            return
        if name in self._replicas:
            self._remove(name)
        self._devices.remove_replica(name)

    def _is_running(self, name: str) -> bool:
        return name in self._replicas and self._replicas[name].run is not None

    # -- replicas without progress ---------------------------------------------------------------------------------

    def replace_stuck(self) -> None:
        """Restart the replicas without progress. They may still answer heartbeats."""
        for name, reason in self._find_stuck().items():
            self.handle_exit(name, reason)

    def _find_stuck(self) -> dict[str, str]:
        """Take back overdue prompts; return all replicas without progress, each with its exceeded limit."""
        late, now_s = {}, time.monotonic()
        start_s, group_s = self._config.timeouts.start_s, self._config.rollout.group_timeout_s
        turn_s = group_s + _TRANSFERS_IN_A_TURN * (group_s + self._config.weights.timeout_s)
        overdue = self._ledger.expire_overdue()
        for name, replica in list(self._replicas.items()):
            if self._awaits_devices(name):
                self._replicas[name] = replica = dataclasses.replace(replica, started_s=now_s)
            if replica.replica_id in overdue:
                late[name] = f"it made no progress on a prompt for rollout.group_timeout_s={group_s:g}"
            elif replica.run is None and now_s - replica.started_s > start_s:
                late[name] = f"it was not set up within timeouts.start_s={start_s:g}"
            elif self._monitor.loop_turn_s(name) > turn_s:
                late[name] = f"one turn of its loop has lasted for {self._monitor.loop_turn_s(name):.0f} s"
        if self._evaluation is not None:
            self._evaluation.poll()
            reasons = self._evaluation.stuck()
            late |= {
                name: reasons[replica.replica_id]
                for name, replica in self._replicas.items()
                if replica.replica_id in reasons
            }
        return late

    def _awaits_devices(self, name: str) -> bool:
        """Return whether Ray may have no devices yet for a replica: it is not late."""
        is_initial, is_up = self._replicas[name].is_initial, self._monitor.is_up(name)
        return not is_initial and not is_up and self._devices.may_wait(name)

    # -- changed inputs --------------------------------------------------------------------------------------------

    @property
    def input_changed(self) -> bool:
        """Whether a replacement found a changed input. No restart can fix this, so the run must end."""
        return self._changed_input is not None

    def raise_if_input_changed(self) -> None:
        """Raise the error of the changed input, if there is one.

        Call it only while the trainers are idle and no batch is on its way: the run then still saves a checkpoint.
        """
        if self._changed_input is not None:
            raise self._changed_input

    # -- calls -----------------------------------------------------------------------------------------------------

    def evaluate(self) -> ShardedEvaluation | None:
        """Let the running replicas share an evaluation; return None if no replica runs. Does not block."""
        if not self.running:
            return None
        limit_s = self._config.timeouts.evaluation_s
        self._evaluation = ShardedEvaluation(self._running_handles, staying=self.running_ids, limit_s=limit_s)
        return self._evaluation

    def _running_handles(self) -> dict[str, ReplicaHandle]:
        return {replica.replica_id: replica.handle for replica in self._replicas.values() if replica.run is not None}

    @property
    def running(self) -> int:
        """The number of running replicas that do not leave."""
        return len(self.running_ids())

    def running_ids(self) -> list[str]:
        """Return the replica ids of the running replicas that do not leave, the oldest name first."""
        present = [self._replicas[name] for name in self._wanted if self._is_running(name)]
        return [replica.replica_id for replica in present]

    def begin_stop(self) -> list[Answer[None]]:
        """Tell all replicas to stop; return the answers to wait for."""
        for replica in self._replicas.values():
            replica.handle.stop()
        return [replica.run for replica in self._replicas.values() if replica.run is not None]

    def kill(self) -> None:
        """End the processes."""
        for replica in self._replicas.values():
            replica.handle.kill()
