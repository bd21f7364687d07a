"""All processes of a run as the driver sees them: one ledger, the trainer's ranks and the rollout replicas."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray

from hwrl.checkpoint import find_checkpoints, read_lock
from hwrl.comm import serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.errors import attempt_all
from hwrl.interfaces import PromptGroup
from hwrl.run.cluster.devices import RunDevices
from hwrl.run.cluster.placement import DeviceCounts
from hwrl.run.config import Config
from hwrl.run.fleet.heartbeats import Timeout
from hwrl.run.fleet.monitor import ProcessMonitor
from hwrl.run.fleet.replicas import Replicas
from hwrl.run.fleet.run_ledger import LEDGER, POLL_S, DriverLedger, ledger_died
from hwrl.run.fleet.trainers import TrainerDiedError, Trainers
from hwrl.run.identity import RunInputs
from hwrl.run.inputs import is_local
from hwrl.run.processes.actors import BatchInfo, ProcessSetup
from hwrl.run.processes.answers import Answer, raise_hwrl_error
from hwrl.run.report import EventLog
from hwrl.run.run_directory import record_replicas
from hwrl.run.scaling import ScaleRequest, ScaleRequests
from hwrl.weights import POLICY, POLICY_BASE, withdraw

_CLOSE_TIMEOUT_S = 5.0


class Fleet:
    """All processes of a run, as Ray actors: :attr:`ledger`, :attr:`trainers` and :attr:`replicas`.

    The driver has one thread. Whenever it waits, it calls :meth:`watch` in a loop: this checks heartbeats and time
    limits, logs long waits, and replaces dead replicas. If a trainer rank dies, a call raises TrainerDiedError; then
    call ``trainers.restart``. If the ledger dies, a call raises EngineError, and the run must end.
    """

    def __init__(self, config: Config, *, inputs: RunInputs, log: EventLog) -> None:
        self._config, self._inputs, self._backend, self._log = config, inputs, get_backend(), log
        self._lock = read_lock(config.dir)
        # On a cluster, other machines must reach the store. Without one, no other machine may reach it.
        host = "127.0.0.1" if is_local() else ray.util.get_node_ip_address()
        self._store = serve_store(host, warn=lambda why: log(f"warning: {why}"))
        self._store_address = store_address(self._store)
        self._devices = RunDevices(config, self._backend)
        self._monitor = ProcessMonitor(
            heartbeat_s=config.timeouts.heartbeat_s, log=partial(log, kind="wait"), warn=log, names_hosts=not is_local()
        )
        self._checked_s = time.monotonic()
        self.ledger = DriverLedger(config, monitor=self._monitor)
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
        self._requests: ScaleRequests | None = None
        self._postponed: Exception | None = None

    def _setup_of(self, process: str) -> ProcessSetup:
        devices = self._devices.devices_of(process)
        return ProcessSetup(
            self._config, self._inputs, self._backend.info.name, devices, self._store_address, self._lock
        )

    # -- start -----------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start trainers and replicas at the same time; return when the trainers are set up."""
        set_up_answers = self.trainers.start()
        self.replicas.start()
        self.trainers.wait_until_set_up(set_up_answers)

    def wait_for_replicas(self) -> None:
        """Wait until every replica is set up and ready for its first weights."""
        with self.waiting_for("the replicas to be set up"):
            while self.replicas.are_starting:
                self.watch([])
        self._requests = ScaleRequests(self._config.dir)

    def describe_size(self) -> str:
        """Return a text with the numbers of processes."""
        return f"{self._config.train.ranks} trainer rank(s), {self._config.rollout.replicas} rollout replica(s)"

    @property
    def device_counts(self) -> DeviceCounts:
        """The current number of devices of the replicas and of the run."""
        return self._devices.counts

    def describe(self) -> str:
        """Return a text with the backend and the numbers of processes."""
        return f"hwrl on {self._backend.info.name}: {self.describe_size()}"

    def describe_placement(self) -> str:
        """Return a text with the devices of the processes, the transport of the weights, and the senders."""
        plan = self._devices.plan
        return (
            f"{self._devices.describe()}; weights travel by {plan.transport}: {plan.why_transport}; "
            f"{self._devices.senders} of the trainer's ranks send them: {self._devices.why_senders}"
        )

    # -- calls that need several kinds of processes ------------------------------------------------------------------

    def request_batch(self, count: int, version: int) -> tuple[Answer[list[PromptGroup]], Answer[BatchInfo | None]]:
        """Request a batch; see :meth:`DriverLedger.advance_and_take`. Raises a postponed error of :meth:`watch`."""
        self._raise_postponed()
        return self.ledger.advance_and_take(count, version)

    def serve_new_receivers(self) -> None:
        """Send the current weights if a replica has joined since the last transfer. The trainers must be idle."""
        if self.trainers.new_receivers():
            self.trainers.send_weights()

    # -- waiting ---------------------------------------------------------------------------------------------------

    def waiting_for(self, subject: str) -> AbstractContextManager[None]:
        """Log that the run is waiting for ``subject`` if the block takes long."""
        return self._monitor.waiting_for(subject)

    def note_progress(self) -> None:
        """Note that the user sees a finished step now. A wait is logged when the last line is almost 60 s old."""
        self._monitor.note_progress()

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
        if self._requests is not None and (request := self._requests.poll()) is not None:
            self._scale(request)

    def _scale(self, request: ScaleRequest) -> None:
        """Carry out a request of ``hwrl scale``, write the new number to the run's config.yaml, and answer."""
        assert self._requests is not None, "the request came from it"
        before = self.replicas.wanted
        self._requests.carry_out(
            request,
            scale=lambda count: f"{before} → {count} replicas: {self.replicas.scale(count)}",
            record=partial(record_replicas, self._config),
            log=partial(self._log, kind="scale"),
        )

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
            with self.waiting_for(f"a checkpoint in the background (limit timeouts.trainer_s={limit.limit_s:g} s)"):
                while unfinished and self.trainers.are_saving() and not limit.is_over():
                    ready, unfinished = ray.wait(unfinished, timeout=POLL_S)
                    finished += ready
                    self._monitor.update()
        errors = [partial(raise_hwrl_error, answer) for answer in finished if after and answer in closing]
        self.trainers.kill()
        self.replicas.kill()
        self.ledger.handle.kill()
        self._devices.close()
        attempt_all(*errors)


def _newest_step(config: Config) -> int:
    """Return the step to resume from. It is part of the sampling seed, so that a resumed run draws new samples."""
    directory = config.dir / "checkpoints"
    complete = find_checkpoints(directory)[0] if config.resume and directory.is_dir() else []
    return max((info.step for info in complete), default=0)
