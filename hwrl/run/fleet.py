"""All processes of a run as the driver sees them: one ledger, the trainer's ranks and the rollout replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, cast

import ray

from hwrl.checkpoint import find_checkpoints, read_lock
from hwrl.comm import serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.errors import CommError, EngineError, HwrlError, RunDirectoryError, attempt_all
from hwrl.interfaces import PromptGroup
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceCounts, DeviceReport
from hwrl.run.config import Config
from hwrl.run.identity import RunInputs
from hwrl.run.inputs import is_local, sampling_warning
from hwrl.run.ledger import EMPTY_LEDGER, LEDGER, POLL_S, BatchInfo, LedgerActor, RunLedger, ledger_died
from hwrl.run.monitor import ProcessMonitor, Timeout
from hwrl.run.remote import DEATH_ERRORS, DEATH_NOTICE_S, Answer, ProcessSetup, Remote, TrainActor, value_of, why_died
from hwrl.run.replicas import Replicas
from hwrl.run.run_directory import record_replicas
from hwrl.run.scaling import answer_request, pending_request
from hwrl.run.trainer import TrainerRank
from hwrl.weights import POLICY, POLICY_BASE, withdraw

Watch = Callable[[Sequence[Answer[Any]]], list[Answer[Any]]]
"""Waits up to a second for one of the answers while it watches all processes. Returns the answers that are ready."""

_CLOSE_TIMEOUT_S = 5.0
_IDLE_WITHIN_S = 60.0
"""How long the ranks may take after an error to answer whether they are between two steps."""
_OF_RANK_0 = ("new_receivers",)
"""The calls that rank 0 alone can answer."""


class TrainerDiedError(Exception):
    """A trainer rank has died or hangs. The other ranks cannot continue without it."""


class Fleet:
    """All processes of a run, as Ray actors: :attr:`ledger`, :attr:`trainers` and :attr:`replicas`.

    The driver has one thread. Whenever it waits, it calls :meth:`watch` in a loop: this checks heartbeats and time
    limits, logs long waits, and replaces dead replicas. If a trainer rank dies, a call raises TrainerDiedError; then
    call ``trainers.restart``. If the ledger dies, a call raises EngineError, and the run must end.
    """

    def __init__(self, config: Config, *, inputs: RunInputs, log: Callable[..., None]) -> None:
        self._config, self._inputs, self._backend, self._log = config, inputs, get_backend(), log
        self._lock = read_lock(config.dir)
        # On a cluster, other machines must reach the store. Without one, no other machine may reach it.
        host = "127.0.0.1" if is_local() else ray.util.get_node_ip_address()
        self._store = serve_store(host, warn=lambda why: log(f"warning: {why}"))
        self._store_address = store_address(self._store)
        self._devices = RunDevices(config, self._backend)
        self._monitor = ProcessMonitor(heartbeat_s=config.timeouts.heartbeat_s, log=log, names_hosts=not is_local())
        self._checked_s = time.monotonic()
        self.ledger = RunLedger(config, monitor=self._monitor)
        self.waits = self._monitor.waits
        self.trainers = Trainers(
            config,
            devices=self._devices,
            monitor=self._monitor,
            setup_of=self._setup_of,
            watch=self.watch,
            log=partial(log, kind="trainer"),
        )
        links = (POLICY,) if config.model.lora is None else (POLICY, POLICY_BASE)
        self.replicas = Replicas(
            config,
            devices=self._devices,
            ledger=self.ledger,
            monitor=self._monitor,
            setup_of=self._setup_of,
            seed=config.seed * 1_000_003 + _newest_step(config),
            withdraw=lambda replica: withdraw(self._store, names=links, replica=replica),
            log=log,
        )
        self._has_begun = False
        self._scaled = ""  # the id of the last request of `hwrl scale`
        self._postponed: Exception | None = None

    def _setup_of(self, process: str) -> ProcessSetup:
        devices = self._devices.devices_of(process)
        return ProcessSetup(
            self._config, self._inputs, self._backend.info.name, devices, self._store_address, self._lock
        )

    # -- start -----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start trainers and replicas at the same time; return when the trainers are set up."""
        self._started_s = time.monotonic()
        self._log(f"building {self._describe_size()}")
        if (warning := sampling_warning(self._config)) is not None:
            self._log(warning)
        set_up_answers = self.trainers.start()
        self.replicas.start()
        self.trainers.wait_until_set_up(set_up_answers)

    def begin(self, step: int) -> None:
        """Wait for the replicas, send them the first weights, and log the processes. ``step`` is the last one."""
        config, plan = self._config, self._devices.plan
        with self.waits.waiting_for("the replicas to be set up"):
            while self.replicas.are_starting:
                self.watch([])
        self._has_begun = True
        self.trainers.all.send_weights()
        self._log(
            f"{self._devices.describe()}; weights travel by {plan.transport}: {plan.why_transport}; "
            f"{self._devices.senders} of the trainer's ranks send them: {self._devices.why_senders}"
        )
        follows = f"the next step is {step + 1}" if step < config.train.steps else "no step follows"
        self._log(
            f"hwrl on {self._backend.info.name}: {self._describe_size()}, ready after "
            f"{time.monotonic() - self._started_s:.1f} s; run directory {config.dir}; {follows}"
        )

    def _describe_size(self) -> str:
        return f"{self._config.train.ranks} trainer rank(s), {self._config.rollout.replicas} rollout replica(s)"

    @property
    def device_counts(self) -> DeviceCounts:
        """The current number of devices of the replicas and of the run."""
        return self._devices.counts

    # -- calls that need several kinds of processes ------------------------------------------------------------------

    def request_batch(self, version: int) -> tuple[list[PromptGroup], Answer[BatchInfo | None]]:
        """Advance the ledger to ``version``, the newest published one, and request a batch. Does not block.

        Advancing lets the replicas lease more prompts. The batch is only a reference of Ray: the trainers get its
        groups from the ledger's process. The answer describes it. Raises a postponed error of :meth:`watch`.
        """
        self._raise_postponed()
        count = self._config.train.batch_groups
        groups, info = self.ledger.remote.call_for_two(LedgerActor.advance_and_take, count, version)
        return cast(list[PromptGroup], groups), info

    def take_batch(self, version: int, *, stop: Callable[[], bool]) -> tuple[list[PromptGroup], BatchInfo | None]:
        """Wait for the batch of the next step; return it with its description, None if ``stop`` returned True first.

        Sends weights to new receivers meanwhile. The batch is only a reference: see :meth:`request_batch`.
        """
        groups, info = self.request_batch(version)
        with self.waits.waiting_for("a batch of finished prompts"):
            while info not in self.watch([info]):
                if stop():
                    self.ledger.ask(LedgerActor.abandon_take)
                    break
                self.serve_new_receivers()
        return groups, self.ledger.value_of(info)  # a batch that was given before is trained on

    def serve_new_receivers(self) -> None:
        """Send the current weights if a replica has joined since the last transfer. The trainers must be idle."""
        if self.trainers.all.new_receivers():
            self.trainers.all.send_weights()

    def restart_trainers(self, death: TrainerDiedError) -> None:
        """Start all trainer ranks again; load a checkpoint next. Raises EngineError after ``train.max_restarts``.

        This ends all leases, and the ledger admits no prompts until the checkpoint's state is loaded. Replicas without
        weights make no progress meanwhile, and must not count as stuck.
        """
        self.ledger.ask(LedgerActor.load_state_dict, EMPTY_LEDGER, self.trainers.incarnation + 1)
        self.trainers.restart(death)

    # -- waiting ---------------------------------------------------------------------------------------------------

    def watch(self, answers: Sequence[Answer[Any]]) -> list[Answer[Any]]:
        """Wait up to ``POLL_S`` for the next event; return the ``answers`` that are ready.

        Replaces replicas that have died, do not answer heartbeats, or make no progress. Raises TrainerDiedError or
        EngineError if a trainer rank or the ledger does not answer heartbeats. A trainer rank that died or failed is
        noticed by the call that waits for its answer, not here.

        While the trainers are in a call, an error of another process is postponed: it is raised when the call is over,
        and the run can then save what the call has finished.
        """
        self._raise_postponed()
        self._postponing(self._check_processes)
        watched = dict.fromkeys([*answers, *self.replicas.answers])
        if not watched:  # all replicas are in the pause before a restart
            time.sleep(POLL_S)
            return []
        ready, _ = ray.wait(list(watched), num_returns=1, timeout=POLL_S)
        for answer in ready:
            self._postponing(partial(self.replicas.handle_event, answer))
        return [answer for answer in ready if answer in answers]

    def _postponing(self, act: Callable[[], None]) -> None:
        try:
            act()
        except TrainerDiedError:
            raise
        except Exception as exc:
            if not self.trainers.is_busy:
                raise
            self._postponed = self._postponed or exc

    def _raise_postponed(self) -> None:
        if self._postponed is not None and not self.trainers.is_busy:
            error, self._postponed = self._postponed, None
            raise error

    def _check_processes(self) -> None:
        """Check heartbeats and time limits, at most once in ``POLL_S``."""
        if time.monotonic() - self._checked_s < POLL_S:
            return
        self._checked_s = time.monotonic()
        self._monitor.update()
        for name, reason in self._monitor.unresponsive().items():
            if name in self.replicas:
                self.replicas.handle_exit(name, reason)
            elif name == LEDGER:
                raise ledger_died(reason)
            else:
                raise TrainerDiedError(f"{self._monitor.locate(name)}: {reason}")
        self.replicas.replace_stuck()
        self.replicas.start_pending()
        if self._has_begun and (request := pending_request(self._config.dir, carried_out=self._scaled)) is not None:
            self._scaled = request["id"]
            self.carry_out(request)

    def carry_out(self, request: dict[str, Any]) -> None:
        """Carry out a request of ``hwrl scale``, write the new number to the run's config.yaml, and answer.

        If that file cannot be written, the answer is the outcome with a warning.
        """
        before, count, log = self.replicas.wanted, int(request["replicas"]), partial(self._log, kind="scale")
        try:
            outcome = f"{before} → {count} replicas: {self.replicas.scale(count)}"
        except HwrlError as error:  # nothing has changed
            answer_request(self._config.dir, request, error=error)
            return
        log(outcome)
        try:
            record_replicas(self._config, count)
        except RunDirectoryError as error:
            warning = f"warning: {error.what}: {error.why}; {error.fix}"
            log(warning)
            outcome = f"{outcome}\n{warning}"
        answer_request(self._config.dir, request, text=outcome)

    # -- the end ---------------------------------------------------------------------------------------------------

    def close(self, *, after: BaseException | None = None) -> None:
        """End every process. A process that still answers first releases its files and memory.

        If the run has failed, with the error ``after``, this also raises the errors of closing the trainers: a save in
        the background may have failed. It waits for such a save up to ``timeouts.trainer_s``, except after a
        KeyboardInterrupt. A run that has not failed has closed them before.
        """
        self._monitor.finish()
        closing = self.trainers.begin_close()
        pending = [*closing, *self.replicas.begin_stop()]
        finished = ray.wait(pending, num_returns=len(pending), timeout=_CLOSE_TIMEOUT_S)[0] if pending else []
        if after is not None and not isinstance(after, KeyboardInterrupt):
            unfinished = [answer for answer in closing if answer not in finished]
            limit = Timeout(self._config.timeouts.trainer_s)
            with self.waits.waiting_for(
                f"a checkpoint in the background (limit timeouts.trainer_s={limit.limit_s:g} s)"
            ):
                while unfinished and self.trainers.are_saving() and not limit.is_over():
                    ready, unfinished = ray.wait(unfinished, timeout=POLL_S)
                    finished += ready
                    self._monitor.update()
        errors = [partial(_raise_error, answer) for answer in finished if after and answer in closing]
        self.trainers.kill()
        self.replicas.kill()
        self.ledger.remote.kill()
        self._devices.close()
        attempt_all(*errors)


class Trainers:
    """Starts the trainer ranks and calls them.

    Calls go through :attr:`all`, with ``watch`` running meanwhile. An HwrlError in a rank is raised as itself. If a
    rank dies or hangs, a call raises TrainerDiedError; then call :meth:`restart`.
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
        self._ranks: list[Remote[TrainerRank]] = []
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
        self._ranks = [Remote(TrainActor, **self._devices.ray_options(name)) for name in self._devices.ranks]
        for name, rank in zip(self._devices.ranks, self._ranks, strict=True):
            self._monitor.watch(name, rank)
        return [
            remote.set_up(
                self._setup_of(name),
                rank=rank,
                incarnation=self.incarnation,
                transport=self._devices.plan.transport,
                senders=self._devices.senders,
            )
            for rank, (name, remote) in enumerate(zip(self._devices.ranks, self._ranks, strict=True))
        ]

    def wait_until_set_up(self, set_up: list[Answer[DeviceReport | None]]) -> None:
        """Wait until the ranks of :meth:`start` are set up, and check the devices that they report."""
        with self._monitor.waits.waiting_for("the trainers to be set up"):
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

    @property
    def all(self) -> TrainerRank:
        """All ranks, as if they were one.

        A call of a method goes to every rank, blocks until all have answered, and returns the answer of rank 0.
        """
        return cast(TrainerRank, self)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_") or not hasattr(TrainerRank, method):
            raise AttributeError(method)
        return partial(self._call, method)

    def _call(self, method: str, *arguments: Any, **keywords: Any) -> Any:
        ranks, what = self._ranks[: 1 if method in _OF_RANK_0 else None], TrainerRank.ALLOCATES.get(method)
        answers = [rank.send(method, *arguments, **keywords) for rank in ranks]
        with nullcontext() if what is None else self._monitor.waits.waiting_for(what):
            return self._gather(answers)[0]

    def idle_step(self) -> int | None:
        """Return the step whose result all ranks have; None if they are in the middle of one.

        Call it after any error. Raises TrainerDiedError if the ranks are dead, or do not answer within a minute,
        because one of them waits for another.
        """
        if not self._set_up_done:
            raise TrainerDiedError("the trainers are not set up")
        answers = [rank.call(TrainerRank.finished_step) for rank in self._ranks]
        steps = set(self._gather(answers, limit_s=min(_IDLE_WITHIN_S, self._config.timeouts.trainer_s)))
        return steps.pop() if len(steps) == 1 else None

    def are_saving(self) -> bool:
        """Return whether a rank is saving a checkpoint in the background. Ranks in a call answer, too."""
        answers = [rank.ping() for rank in self._ranks]
        ready = ray.wait(answers, num_returns=len(answers), timeout=DEATH_NOTICE_S)[0]
        for answer in ready:
            with suppress(*DEATH_ERRORS):
                if value_of(answer).is_saving:
                    return True
        return False

    def begin_close(self) -> list[Answer[None]]:
        """Begin to close the ranks if they are set up. Does not wait; return the answers."""
        return [rank.call(TrainerRank.close) for rank in self._ranks if self._set_up_done]

    def kill(self) -> None:
        """Kill the processes."""
        for rank in self._ranks:
            rank.kill()

    def _gather(
        self, answers: list[Answer[Any]], *, limit_s: float | None = None, key: str = "timeouts.trainer_s"
    ) -> list[Any]:
        """Wait for ``answers`` and return their values.

        Raises the error of a rank. Raises TrainerDiedError if a rank died, even if another rank failed first as a
        consequence, and also after ``limit_s`` seconds. ``key`` is the setting that has this limit.
        """
        pending, limit_s = list(answers), self._config.timeouts.trainer_s if limit_s is None else limit_s
        timeout = Timeout(limit_s)
        # Not strict, because some calls go to rank 0 alone.
        names = {answer: self._monitor.locate(name) for answer, name in zip(answers, self._devices.ranks, strict=False)}
        self.is_busy = self._set_up_done
        try:
            while pending:
                if timeout.is_over():
                    raise TrainerDiedError(f"a rank did not answer a call within {key}={limit_s:g} s")
                for answer in self._watch(pending):
                    pending.remove(answer)
                    self._raise_cause(answer, pending, names)
        finally:
            self.is_busy = False
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
                    try:
                        value_of(other, process=names[other])
                    except DEATH_ERRORS as death:
                        raise TrainerDiedError(f"{names[other]}: {why_died(death)}") from exc
                    except HwrlError:
                        if isinstance(exc, CommError):
                            raise
            raise


def _raise_error(answer: Answer[Any]) -> None:
    """Raise the error of a finished call, if it raised one. Ignore a death."""
    with suppress(*DEATH_ERRORS):
        value_of(answer)


def _newest_step(config: Config) -> int:
    """Return the step to resume from. It is part of the sampling seed, so that a resumed run draws new samples."""
    directory = config.dir / "checkpoints"
    complete = find_checkpoints(directory)[0] if config.resume and directory.is_dir() else []
    return max((info.step for info in complete), default=0)
