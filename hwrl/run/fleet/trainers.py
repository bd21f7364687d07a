"""The driver's view of the trainer: one object that calls all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ray

from hwrl.errors import CommError, EngineError, HwrlError
from hwrl.interfaces import PromptGroup
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceReport
from hwrl.run.config import Config
from hwrl.run.fleet.heartbeats import Timeout
from hwrl.run.fleet.monitor import ProcessMonitor
from hwrl.run.inputs import is_local
from hwrl.run.processes.actors import ProcessSetup, RestoredRun, StepOutcome
from hwrl.run.processes.answers import DEATH_ERRORS, DEATH_NOTICE_S, Answer, ValueT, death_of, value_of, why_died
from hwrl.run.processes.handles import TrainerHandle
from hwrl.run.report.records import Metrics

Watch = Callable[[Sequence[Answer[Any]]], list[Answer[Any]]]
"""Waits up to a second for one of the answers while it watches all processes. Returns the answers that are ready."""

_IDLE_WITHIN_S = 60.0
"""How long the ranks may take after an error to answer whether they are between two steps."""


class TrainerDiedError(Exception):
    """A trainer rank has died or hangs. The other ranks cannot continue without it."""


class Trainers:
    """Starts the trainer ranks and calls them.

    Each call goes to all ranks and blocks until all have answered, with ``watch`` running meanwhile. Only
    :meth:`new_receivers` and :meth:`finish_profile` go to rank 0 alone. An HwrlError in a rank is raised as itself. If
    a rank dies or hangs, a call raises TrainerDiedError; then call :meth:`restart`.
    """

    def __init__(
        self,
        config: Config,
        *,
        devices: RunDevices,
        monitor: ProcessMonitor,
        setup_of: Callable[[str], ProcessSetup],
        watch: Watch,
        log: Callable[[str], None],
    ) -> None:
        self._config, self._devices, self._monitor = config, devices, monitor
        self._setup_of, self._watch, self._log = setup_of, watch, log
        self._ranks: list[TrainerHandle] = []
        self._set_up_done = False
        self._starts = 0
        self.is_busy = False
        """Whether ranks that are set up are in a call."""

    @property
    def incarnation(self) -> int:
        """The number of starts of the trainer before the current one: 0 until the first restart."""
        return self._starts - 1

    # -- start -----------------------------------------------------------------------------------------------------

    def start(self) -> list[Answer[DeviceReport | None]]:
        """Start all ranks and begin to set them up. Pass the returned answers to :meth:`wait_until_set_up`."""
        self._starts += 1
        self._set_up_done = False
        self._ranks = [TrainerHandle(**self._devices.ray_options(name)) for name in self._devices.ranks]
        for name, rank in zip(self._devices.ranks, self._ranks, strict=True):
            self._monitor.watch(name, rank)
        return [
            handle.set_up(
                self._setup_of(name),
                rank=rank,
                incarnation=self.incarnation,
                transport=self._devices.plan.transport,
                senders=self._devices.senders,
            )
            for rank, (name, handle) in enumerate(zip(self._devices.ranks, self._ranks, strict=True))
        ]

    def wait_until_set_up(self, set_up: list[Answer[DeviceReport | None]]) -> None:
        """Wait until the ranks of :meth:`start` are set up, and check the devices that they report."""
        with self._monitor.waiting_for("the trainers to be set up"):
            reports = self._gather(set_up, limit_s=self._config.timeouts.start_s, key="timeouts.start_s")
        for name, report in zip(self._devices.ranks, reports, strict=True):
            self._devices.check_report(name, report)
        self._set_up_done = True

    def restart(self, cause: Exception) -> None:
        """Kill all ranks and start new ones. Raises EngineError after ``train.max_restarts`` restarts in total."""
        if self._starts > self._config.train.max_restarts:
            raise EngineError(
                f"the trainer died {self._starts} times",
                why=str(cause),
                fix="fix the cause, or raise train.max_restarts; resume=true continues the run",
            ) from cause
        self._log(f"a trainer died ({cause}); all its ranks start again")
        for name, rank in zip(self._devices.ranks, self._ranks, strict=True):
            self._devices.forget(name)
            self._monitor.forget(name)
            rank.kill()
        self.wait_until_set_up(self.start())

    # -- calls -----------------------------------------------------------------------------------------------------

    def restore(self) -> RestoredRun | None:
        """Load the newest complete checkpoint; return None if there is none."""
        return self._call("the trainer to load a checkpoint", [rank.restore() for rank in self._ranks])

    def send_weights(self) -> None:
        """Send the current weights to the replicas."""
        self._call("the trainer to send weights", [rank.send_weights() for rank in self._ranks])

    def publish_last_weights(self) -> None:
        """Send the current weights as a further version. For the end of a run whose last step published none."""
        self._call("the trainer to send weights", [rank.publish_last_weights() for rank in self._ranks])

    def new_receivers(self) -> tuple[str, ...]:
        """Return the replicas that connected after the newest weights were sent."""
        return self._gather([self._ranks[0].new_receivers()])[0]

    def step(self, groups: Answer[list[PromptGroup]]) -> StepOutcome:
        """Train one step on the batch ``groups``, and send the weights if they are due; return rank 0's outcome."""
        return self._call("a training step", [rank.step(groups) for rank in self._ranks])

    def finished_step(self) -> int | None:
        """Return the step whose result all ranks have; None if they are in the middle of one.

        Call it after any error. Raises TrainerDiedError if the ranks are dead, or do not answer within a minute,
        because one of them waits for another.
        """
        if not self._set_up_done:
            raise TrainerDiedError("the trainers are not set up")
        answers = [rank.finished_step() for rank in self._ranks]
        steps = set(self._gather(answers, limit_s=min(_IDLE_WITHIN_S, self._config.timeouts.trainer_s)))
        return steps.pop() if len(steps) == 1 else None

    def finish_profile(self) -> str | None:
        """Write the profile of rank 0 if steps are recorded. Return a message about it once, and None otherwise."""
        return self._call("the trainer to write its profile", [self._ranks[0].finish_profile()])

    def save(self, ledger: dict[str, Any]) -> Metrics:
        """Save a checkpoint with the ledger's state; return the seconds that the trainer waited for it."""
        return self._call("the trainer to save a checkpoint", [rank.save(ledger) for rank in self._ranks])

    def export_model(self) -> None:
        """Write the trained model to the run directory."""
        self._call("the trainer to export the model", [rank.export_model() for rank in self._ranks])

    def close(self) -> None:
        """Wait for a save in the background, and close all connections."""
        self._call("the trainer to close", [rank.close() for rank in self._ranks])

    def are_saving(self) -> bool:
        """Return whether a rank is saving a checkpoint in the background. Ranks in a call answer, too."""
        answers = [rank.ping() for rank in self._ranks]
        ready = ray.wait(answers, num_returns=len(answers), timeout=DEATH_NOTICE_S)[0]
        return any(death_of(answer) is None and value_of(answer).is_saving for answer in ready)

    def begin_close(self) -> list[Answer[None]]:
        """Begin to close the ranks if they are set up. Does not wait; return the answers."""
        return [rank.close() for rank in self._ranks if self._set_up_done]

    def kill(self) -> None:
        """Kill the processes."""
        for rank in self._ranks:
            rank.kill()

    def _call(self, subject: str, answers: list[Answer[ValueT]]) -> ValueT:
        """Wait for the answers of all ranks; return the answer of rank 0."""
        with self._monitor.waiting_for(subject):
            return self._gather(answers)[0]

    def _gather(
        self, answers: list[Answer[ValueT]], *, limit_s: float | None = None, key: str = "timeouts.trainer_s"
    ) -> list[ValueT]:
        """Wait for ``answers`` and return their values.

        Raises the error of a rank. Raises TrainerDiedError if a rank died, even if another rank failed first as a
        consequence, and also after ``limit_s`` seconds. ``key`` is the setting that has this limit.
        """
        self.is_busy = self._set_up_done
        try:
            return self._gather_all(answers, limit_s=limit_s, key=key)
        finally:
            self.is_busy = False

    def _gather_all(self, answers: list[Answer[ValueT]], *, limit_s: float | None, key: str) -> list[ValueT]:
        pending, limit_s = list(answers), self._config.timeouts.trainer_s if limit_s is None else limit_s
        timeout = Timeout(limit_s)
        # Not strict, because some calls go to rank 0 alone.
        names = {answer: self._monitor.locate(name) for answer, name in zip(answers, self._devices.ranks, strict=False)}
        while pending:
            if timeout.is_over():
                raise TrainerDiedError(f"a rank did not answer a call within {key}={limit_s:g} s")
            for answer in self._watch(pending):
                pending.remove(answer)
                self._raise_cause(answer, pending, names)
        return [value_of(answer) for answer in answers]

    def _raise_cause(self, answer: Answer[Any], pending: list[Answer[Any]], names: dict[Answer[Any], str]) -> None:
        """Raise the error in ``answer``, if it has one. If another rank has died, raise that instead: it is the cause.

        So after an error this waits for a while whether one of the ``pending`` answers brings a death. On a cluster the
        wait includes ``timeouts.heartbeat_s``, because the loss of a machine is noticed only after that time. A
        CommError is the consequence of another rank's error, too.
        """
        try:
            value_of(answer, process=names[answer])
        except DEATH_ERRORS as exc:
            raise TrainerDiedError(f"{names[answer]}: {why_died(exc)}") from exc
        except HwrlError as exc:
            timeout = Timeout(DEATH_NOTICE_S + (0.0 if is_local() else self._config.timeouts.heartbeat_s))
            while pending and not timeout.is_over():
                for other in self._watch(pending):  # raises TrainerDiedError for a rank without heartbeats
                    pending.remove(other)
                    if (reason := death_of(other)) is not None:
                        raise TrainerDiedError(f"{names[other]}: {reason}") from exc
                    if isinstance(exc, CommError):
                        value_of(other, process=names[other])  # raises the cause, if this rank has it
            raise
