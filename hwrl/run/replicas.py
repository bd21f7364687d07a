"""The rollout replicas of a run: start them, replace dead and stuck ones, and let some join or leave."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from hwrl.errors import EngineError, HwrlError, InputChangedError, first_line
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceReport
from hwrl.run.config import Config
from hwrl.run.evaluation import ShardedEvaluation
from hwrl.run.ledger import ForgottenReplica, LedgerActor, RunLedger
from hwrl.run.monitor import ProcessMonitor
from hwrl.run.remote import DEATH_ERRORS, Answer, ProcessSetup, Remote, RolloutActor, value_of, why_died, why_ended
from hwrl.run.replica import Replica

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MOST_DOUBLINGS = 10
"""Enough for the longest pause. 2.0 to the power of a large number of deaths raises OverflowError."""
_TRANSFERS_IN_A_TURN = 4
"""The maximum number of weight transfers in one turn of a rollouter's loop."""
_NUMBER, _CAUSE_CHARACTERS = re.compile(r"0x[0-9a-f]+|\d+"), 100
_FEW_DEATHS = 3
"""So many deaths of one cause are reported at the end of the run."""
_SEEDS = 1 << 31
"""Seeds are smaller than this number: every library accepts them."""


class RestartPlan:
    """Counts the consecutive deaths of each replica, and has the time of its next start.

    A process that has finished a prompt before its death resets the count, unless it died like the process before it,
    and had taken new weights no more than once: then it dies at each update. The first restart is immediate. The pauses
    before the next ones are 1, 2, 4, ... seconds, at most 60: an exponential backoff, so that a crash loop costs
    little. After ``limit`` consecutive restarts the replica is given up. ``clock`` returns seconds.
    """

    def __init__(self, limit: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._clock = limit, clock
        self._deaths: Counter[str] = Counter()
        self._due_s: dict[str, float] = {}
        self._cause_of: dict[str, str] = {}  # of the last death

    def add_death(self, name: str, *, finished: bool, updates: int = 0, cause: str = "") -> float | None:
        """Count a death of the replica ``name``; ``finished`` says whether this process had finished a prompt.

        ``updates`` is the number of times that it had taken new weights, its first ones included.
        Returns the pause before the restart in seconds; None if the replica is given up.
        """
        again = bool(cause) and cause == self._cause_of.get(name) and updates <= 1
        self._cause_of[name] = cause
        deaths = self._deaths[name] = 1 if finished and not again else self._deaths[name] + 1
        if deaths > self._limit:
            self.forget(name)
            return None
        doublings = min(deaths - 2, _MOST_DOUBLINGS)
        pause_s = min(_FIRST_PAUSE_S * 2.0**doublings, _LONGEST_PAUSE_S) if deaths > 1 else 0.0
        self._due_s[name] = self._clock() + pause_s
        return pause_s

    @property
    def paused(self) -> set[str]:
        """The replicas in the pause between a death and a restart."""
        return set(self._due_s)

    def take_due(self) -> list[str]:
        """Return the replicas whose pause is over, and remove them from :attr:`paused`. The caller starts them."""
        due = [name for name, due_s in self._due_s.items() if due_s <= self._clock()]
        for name in due:
            del self._due_s[name]
        return due

    def forget(self, name: str) -> None:
        """Forget all deaths of ``name``: a new replica with this name starts with a count of 0."""
        self._deaths.pop(name, None)
        self._cause_of.pop(name, None)
        self._due_s.pop(name, None)


@dataclass
class _Process:
    remote: Remote[Replica]
    replica_id: str  # of this process; a replacement has the same name and another id
    is_initial: bool  # it started with the run: an error during its setup ends the run
    started_s: float
    run: Answer[None] | None = None  # ready when the replica has ended; None during the setup
    is_leaving: bool = False


class Replicas:
    """Starts the replicas, and replaces dead ones under their old names, after the pauses of :class:`RestartPlan`.

    A replica is first set up. Then it runs until the run ends, or until :meth:`scale` lets it leave. The driver waits
    for one of :attr:`answers` to become ready, and passes it to :meth:`handle_event`. A replica is given up if it dies
    ``rollout.max_restarts`` + 1 times without finishing a prompt in between, or at each update of its weights. The run
    continues as long as ``rollout.min_replicas`` are left.

    ``withdraw`` is called with the name of each replica that has ended, so that weight transfers do not wait for it.
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
        withdraw: Callable[[str], None],
        log: Callable[..., None],
    ) -> None:
        self._config, self._devices, self._ledger, self._monitor = config, devices, ledger, monitor
        self._setup_of, self._seed, self._withdraw = setup_of, seed, withdraw
        self._log = partial(log, kind="replica")
        self._log_scale = partial(log, kind="scale")
        self._restarts = RestartPlan(config.rollout.max_restarts)
        self._wanted: list[str] = []  # the names of the replicas that should run, starting and paused ones included
        self._minimum = config.rollout.min_replicas or config.rollout.replicas
        self._replicas: dict[str, _Process] = {}
        self._starting: dict[Answer[DeviceReport | None], str] = {}
        self._starts = 0
        self.deaths: Counter[str] = Counter()
        """How often replicas have ended, by cause: the beginning of the reason, without its numbers."""
        self._evaluation: ShardedEvaluation | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    # -- events ----------------------------------------------------------------------------------------------------

    @property
    def answers(self) -> list[Answer[Any]]:
        """The answers to wait for: of setups, of runs, and of parts of an evaluation. A ready one is an event."""
        return [*self._running(), *self._starting, *(self._evaluation.answers if self._evaluation is not None else ())]

    @property
    def are_starting(self) -> bool:
        """Whether a replica is being set up, or is in the pause before a restart."""
        return bool(self._starting or self._restarts.paused)

    def handle_event(self, answer: Answer[Any]) -> None:
        """Handle a ready answer: run a replica that is set up, replace an ended one, or continue an evaluation.

        Ignores answers of other processes.
        """
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
        """Let the replica run. If its setup failed, replace it.

        Raises the error of an initial replica. Raises InputChangedError if a replacement has found a changed input:
        there is no further replacement, because no restart can fix this.
        """
        name = self._starting.pop(answer)
        replica = self._replicas[name]
        try:
            self._devices.check_report(name, value_of(answer, process=name))
        except DEATH_ERRORS as exc:
            self.handle_exit(name, why_died(exc))
            return
        except HwrlError as exc:
            if replica.is_initial:
                raise
            if isinstance(exc, InputChangedError):
                self._remove(name)
                raise
            self.handle_exit(name, f"it could not be set up: {first_line(exc)}")
            return
        replica.run = replica.remote.call(Replica.run)
        if not replica.is_initial:
            took_s = time.monotonic() - replica.started_s
            self._log_scale(f"rollout {name} joined after {took_s:.1f} s; {len(self._running())} replicas run now")

    # -- start and restart -----------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start all replicas. Does not wait until they are set up."""
        self._wanted = list(self._devices.replicas)
        for name in self._wanted:
            self._start(name, is_initial=True)

    def _start(self, name: str, *, is_initial: bool = False) -> None:
        """Start a process for the replica ``name``, with a new replica id."""
        start, self._starts = self._starts, self._starts + 1
        replica_id = f"{name}#{start}"
        remote = Remote[Replica](RolloutActor, max_concurrency=4, **self._devices.ray_options(name))
        self._replicas[name] = _Process(remote, replica_id, is_initial=is_initial, started_s=time.monotonic())
        self._monitor.watch(name, remote)
        set_up = remote.set_up(
            self._setup_of(name),
            name=name,
            replica_id=replica_id,
            seed=(self._seed + 1009 * start) % _SEEDS,
            ledger=self._ledger.remote,
        )
        self._starting[set_up] = name

    def handle_exit(self, name: str, reason: str) -> None:
        """Handle the end of the process of replica ``name``; kill the process if it still exists.

        A replica that was leaving is now gone. Any other one gets a replacement, at once or after a pause, or is given
        up. Raises EngineError if too few replicas are left.
        """
        replica = self._replicas[name]
        located = self._monitor.locate(name)
        lost, finished, updates = self._remove(name)
        if replica.is_leaving:
            self._devices.remove_replica(name)
            running = len(self._running())
            self._log_scale(
                f"rollout {located} left ({reason}); {lost} prompts go to others; {running} replicas run now"
            )
            return
        ended = f"rollout {located} ended ({reason}); {lost} prompts go to others"
        cause = _NUMBER.sub("#", reason[:_CAUSE_CHARACTERS])
        self.deaths[cause] += 1
        pause_s = self._restarts.add_death(name, finished=finished, updates=updates, cause=cause)
        if pause_s is None:
            self._give_up(name, reason, ended)
            return
        self._log(f"{ended}; a new replica starts{f' in {pause_s:g} s' if pause_s else ''}")
        self.start_pending()

    def start_pending(self) -> None:
        """Start the replacements whose pause is over."""
        for name in self._restarts.take_due():
            self._start(name)

    def _give_up(self, name: str, reason: str, ended: str) -> None:
        """Continue without the replica ``name``. Raises EngineError if too few replicas are left."""
        self._wanted.remove(name)
        self._devices.remove_replica(name)
        restarts = self._config.rollout.max_restarts
        times = f"{restarts + 1} times in a row" if restarts else "once"
        if len(self._wanted) < self._minimum:
            raise EngineError(
                f"rollout {name} died {times}{' without doing its work in between' if restarts else ''}",
                why=reason,
                fix="fix the cause, or raise rollout.max_restarts; with a lower rollout.min_replicas a run continues "
                "with fewer replicas; resume=true continues this run",
            )
        self._log_scale(f"{ended}; it died {times} and is given up; {len(self._wanted)} replicas are left")

    def _remove(self, name: str) -> ForgottenReplica:
        """Kill the process of the replica ``name`` and forget it; its prompts go to other replicas."""
        replica = self._replicas.pop(name)
        self._devices.forget(name)
        self._starting = {answer: other for answer, other in self._starting.items() if other != name}
        self._monitor.forget(name)
        replica.remote.kill()
        self._withdraw(name)
        return self._ledger.ask(LedgerActor.forget, replica.replica_id)

    # -- joining and leaving ---------------------------------------------------------------------------------------

    @property
    def wanted(self) -> int:
        """The number of replicas that should run: those that run, are starting, or pause before a restart."""
        return len(self._wanted)

    def scale(self, count: int) -> str:
        """Change the number of replicas to ``count``; return a message about the change. Does not block.

        A new replica builds its model while the others continue, and then gets the newest weights. A leaving replica
        leases no more prompts and finishes those that it has. Raises ConfigError if there are too few devices; then
        nothing has changed.
        """
        before = len(self._wanted)
        self._minimum = min(self._minimum, count)
        if count > before:
            return self._add(count - before)
        names = sorted(self._wanted, key=lambda name: (self._is_running(name), -self._wanted.index(name)))
        for name in names[: before - count]:
            self._let_leave(name)
        gone = ", ".join(name for name in names[: before - count] if name not in self._replicas)
        leaving = ", ".join(name for name in names[: before - count] if name in self._replicas)
        parts = [f"{gone} left at once"] if gone else []
        parts += [f"{leaving} will leave when their prompts are finished"] if leaving else []
        return "; ".join(parts) or f"{count} replicas are already running or starting"

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
            self._replicas[name].is_leaving = True
            self._replicas[name].remote.call(Replica.leave)
            return
        if name in self._replicas:
            self._remove(name)
        self._devices.remove_replica(name)

    def _is_running(self, name: str) -> bool:
        return name in self._replicas and self._replicas[name].run is not None

    def repeated_deaths(self) -> list[str]:
        """Return a sentence for each cause of several deaths: a run with them is not healthy, even if it goes on."""
        return [
            f"replicas ended {count} times by the same cause: {cause}"
            for cause, count in self.deaths.most_common()
            if count >= _FEW_DEATHS
        ]

    # -- replicas without progress ---------------------------------------------------------------------------------

    def replace_stuck(self) -> None:
        """Replace the replicas that make no progress. They may still answer heartbeats."""
        for name, reason in self._find_stuck().items():
            self.handle_exit(name, reason)

    def _find_stuck(self) -> dict[str, str]:
        """Make overdue prompts free for others; return the stuck replicas by name, each with the exceeded limit."""
        stuck, now_s = {}, time.monotonic()
        start_s, group_s = self._config.timeouts.start_s, self._config.rollout.group_timeout_s
        turn_s = group_s + _TRANSFERS_IN_A_TURN * (group_s + self._config.weights.timeout_s)
        overdue = self._ledger.ask(LedgerActor.expire_overdue)
        for name, replica in list(self._replicas.items()):
            if self._awaits_devices(name):  # the limit for its setup starts when it has devices
                replica.started_s = now_s
            if replica.replica_id in overdue:
                stuck[name] = f"it made no progress on a prompt for rollout.group_timeout_s={group_s:g} s"
            elif replica.run is None and now_s - replica.started_s > start_s:
                stuck[name] = f"it was not set up within timeouts.start_s={start_s:g} s"
            elif self._monitor.loop_turn_s(name) > turn_s:
                stuck[name] = f"one turn of its loop has lasted for {self._monitor.loop_turn_s(name):.0f} s"
        if self._evaluation is not None:
            self._evaluation.poll()
            reasons = self._evaluation.stuck()
            stuck |= {
                name: reasons[replica.replica_id]
                for name, replica in self._replicas.items()
                if replica.replica_id in reasons
            }
        return stuck

    def _awaits_devices(self, name: str) -> bool:
        """Return whether the replica may still be waiting for devices from Ray. Then it is not stuck."""
        is_initial, is_up = self._replicas[name].is_initial, self._monitor.is_up(name)
        return not is_initial and not is_up and self._devices.may_wait(name)

    # -- calls -----------------------------------------------------------------------------------------------------

    def evaluate(self, *, alone: bool = False) -> ShardedEvaluation | None:
        """Start an evaluation on the running replicas; return None if no replica runs. Does not block.

        It is beside training, in a share of the replicas' places, or ``alone``.
        """
        if not self.running_ids():
            return None
        limit_s = self._config.timeouts.evaluation_s
        self._evaluation = ShardedEvaluation(
            self._running_remotes, staying=self.running_ids, limit_s=limit_s, alone=alone
        )
        return self._evaluation

    def _running_remotes(self) -> dict[str, Remote[Replica]]:
        return {replica.replica_id: replica.remote for replica in self._replicas.values() if replica.run is not None}

    def running_ids(self) -> list[str]:
        """Return the ids of the running replicas that are not leaving, in the order of their starts.

        A replacement is one of the last, so that it sleeps rather than a replica that has weights already.
        """
        return [
            replica.replica_id
            for name, replica in self._replicas.items()
            if name in self._wanted and replica.run is not None
        ]

    def begin_stop(self) -> list[Answer[None]]:
        """Tell all replicas to stop; return the answers to wait for."""
        for replica in self._replicas.values():
            replica.remote.call(Replica.stop)
        return [replica.run for replica in self._replicas.values() if replica.run is not None]

    def kill(self) -> None:
        """Kill the processes."""
        for replica in self._replicas.values():
            replica.remote.kill()
