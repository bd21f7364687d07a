"""The processes of a run: starts them as Ray actors, waits for them, and replaces rollout replicas that die."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import ray
from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayError, RayTaskError

from hwrl.checkpoint import find_checkpoints
from hwrl.comm import serve_store, store_address
from hwrl.discovery import get_backend
from hwrl.errors import EngineError, HwrlError, InputChangedError, attempt_all
from hwrl.run.actors import LedgerActor, RolloutActor, TrainActor
from hwrl.run.config import Config
from hwrl.run.devices import RunDevices
from hwrl.run.heartbeats import GROUP, Heartbeats, Patience
from hwrl.run.identity import RunInputs
from hwrl.run.inputs import is_local
from hwrl.run.waits import WaitLog

POLL_S = 1.0
DEATHS = (RayActorError, NodeDiedError, OutOfMemoryError)
"""What Ray raises for a call to a process that is gone."""
_TRANSFER_WAITS = 4
_SEEDS = 1 << 31  # some libraries take no larger one
DEATH_NOTICE_S = 5.0  # a survivor may fail before Ray has told that its peer is dead
GOODBYE_S = 5.0


class TrainerDiedError(Exception):
    """A trainer rank is gone; the other ranks are of no use without it."""


@dataclasses.dataclass(frozen=True)
class _Replica:
    actor: Any
    incarnation: str
    replaces: bool  # one that died, and may have left its devices full for a while
    started_s: float
    run: Any = None  # not before it is set up


@dataclasses.dataclass(frozen=True)
class _Evaluator:
    replica: str
    answer: Any
    began_s: float


class Fleet:
    """One ledger, the trainer's ranks, and the rollout replicas.

    The driver's calls block and watch every process meanwhile; each wait has a limit, and a long one is told. A process
    that does not answer its heartbeat for ``timeouts.heartbeat_s`` counts as dead. A replica that dies is replaced
    under its old name, up to ``rollout.max_restarts`` times; a trainer rank that dies raises TrainerDiedError, after
    which :meth:`relaunch_trainers` is all that helps; without the ledger the run ends with an EngineError.
    """

    def __init__(self, config: Config, *, inputs: RunInputs, say: Callable[[str], None]) -> None:
        self._config, self._inputs, self._say = config, inputs, say
        self._limits = config.timeouts
        self._waits, self._heartbeats = WaitLog(say), Heartbeats()
        self._evaluator: _Evaluator | None = None
        self._checked_s = time.monotonic()
        self._refusal: InputChangedError | None = None
        self._backend = get_backend()
        # Other machines must reach the store; on one machine it is nobody else's business.
        self._store = serve_store("127.0.0.1" if is_local() else ray.util.get_node_ip_address())
        self._store_address = store_address(self._store)
        self._devices = RunDevices(config, self._backend)
        self._ledger: Any = _actor_class(LedgerActor).options(num_cpus=0).remote(config)
        self._heartbeats.watch(_LEDGER, self._ledger)
        self._trainers: list[Any] = []
        self._trainers_answer = False
        self._replicas: dict[str, _Replica] = {}
        self._joining: dict[Any, str] = {}
        self._trainer_starts = self._replica_starts = 0
        self._seed = config.seed * 1_000_003 + _newest_step(config)

    # -- start --------------------------------------------------------------------------------------------------

    def launch(self) -> None:
        """Start trainers and replicas side by side; return when the trainers are set up."""
        set_up = self._launch_trainers()
        for name in self._devices.replicas:
            self._launch_replica(name)
        with self.waiting_for("the trainers to be set up"):
            self._await_trainers(set_up)

    def await_replicas(self) -> None:
        """Return when every replica has joined and waits for weights."""
        with self.waiting_for("the replicas to be set up"):
            while self._joining:
                self.watch([])
        self._raise_refusal()

    def relaunch_trainers(self, cause: Exception) -> None:
        """End all trainer ranks and start new ones, unless that has happened too often."""
        if self._trainer_starts > self._config.train.max_restarts:
            raise EngineError(
                f"the trainer died {self._trainer_starts} times",
                why=str(cause),
                fix="mend the cause, or raise train.max_restarts; resume=true continues the run",
            ) from cause
        self._say(f"a trainer died ({cause}); all its ranks start again")
        for name, trainer in zip(self._devices.ranks, self._trainers, strict=True):
            self._devices.forget(name)
            self._end(name, trainer)
        with self.waiting_for("the trainers to be set up"):
            self._await_trainers(self._launch_trainers())

    @property
    def incarnation(self) -> int:
        """Which incarnation of the trainer runs, counted from 0."""
        return self._trainer_starts - 1

    @property
    def size(self) -> str:
        """How many there are, or will be."""
        return f"{self._config.train.ranks} trainer rank(s), {self._config.rollout.replicas} rollout replica(s)"

    def describe(self) -> str:
        """Say who is there, on the devices that they reported."""
        plan = self._devices.plan
        return (
            f"hwrl on {self._backend.info.name}: {self.size}; {self._devices.describe()}; "
            f"weights travel by {plan.transport}: {plan.why_transport}"
        )

    def _launch_trainers(self) -> list[Any]:
        """Make the trainer's ranks and begin to set them up; return what to wait for."""
        self._trainer_starts += 1
        self._trainers_answer = False
        self._trainers = [
            _actor_class(TrainActor).options(**self._devices.options(name)).remote() for name in self._devices.ranks
        ]
        for name, trainer in zip(self._devices.ranks, self._trainers, strict=True):
            self._heartbeats.watch(name, trainer)
        return [
            trainer.set_up.remote(
                self._config,
                inputs=self._inputs,
                backend=self._backend.info.name,
                told=self._devices.told(name),
                rank=rank,
                store_address=self._store_address,
                incarnation=self.incarnation,
                transport=self._devices.plan.transport,
            )
            for rank, (name, trainer) in enumerate(zip(self._devices.ranks, self._trainers, strict=True))
        ]

    def _await_trainers(self, set_up: list[Any]) -> None:
        holdings = self._gather(set_up, limit_s=self._limits.start_s, key="timeouts.start_s")
        for name, holding in zip(self._devices.ranks, holdings, strict=True):
            self._devices.prove(name, holding)
        self._trainers_answer = True

    def _launch_replica(self, name: str) -> None:
        """Start the replica ``name``. One that takes a dead namesake's place also ends the wait for that one's part
        in a weight transfer; its prompts and figures go under a name of its own.
        """
        start, self._replica_starts = self._replica_starts, self._replica_starts + 1
        incarnation = f"{name}#{start}"
        options = self._devices.options(name)
        actor = _actor_class(RolloutActor).options(max_concurrency=4, **options).remote()
        replaces = start >= self._config.rollout.replicas
        self._replicas[name] = _Replica(actor, incarnation, replaces=replaces, started_s=time.monotonic())
        self._heartbeats.watch(name, actor)
        joining = actor.set_up.remote(
            self._config,
            inputs=self._inputs,
            backend=self._backend.info.name,
            told=self._devices.told(name),
            replica=name,
            incarnation=incarnation,
            seed=(self._seed + 1009 * start) % _SEEDS,
            store_address=self._store_address,
            ledger=self._ledger,
        )
        self._joining[joining] = name

    # -- calls --------------------------------------------------------------------------------------------------

    def waiting_for(self, what: str) -> AbstractContextManager[None]:
        """Say that the run waits for ``what`` if that takes long inside."""
        return self._waits.waiting_for(what)

    def on_trainers(self, method: str, *args: Any) -> list[Any]:
        """Call ``method`` on every rank and return the answers; raises TrainerDiedError, or a rank's own error."""
        with self.waiting_for(f"the trainer's {method!r}"):
            return self._gather([trainer.call.remote(method, *args) for trainer in self._trainers])

    def on_ledger(self, method: str, *args: Any) -> Any:
        """Call ``method`` of the ledger and return its answer."""
        key = "heartbeat_s" if self._heartbeats.is_up(_LEDGER) else "start_s"
        answer, patience = getattr(self._ledger, method).remote(*args), Patience(getattr(self._limits, key))
        while not ray.wait([answer], timeout=POLL_S)[0]:
            self._tell_waits()
            if patience.is_over():
                raise _no_ledger(f"it did not answer {method!r} within timeouts.{key}={patience.limit_s:g}")
        return self.ledger_value(answer)

    def take(self, count: int, version: int) -> tuple[Any, Any]:
        """Ask for a batch; return references to the groups and to the note on them; raise if one has ``refused``."""
        self._raise_refusal()
        groups, note = self._ledger.take.options(num_returns=2).remote(count, version)
        return groups, note

    def ledger_value(self, reference: Any) -> Any:
        """Return what the ledger has answered."""
        try:
            return value_of(reference)
        except DEATHS as exc:
            raise _no_ledger(_first_line(exc)) from exc

    def serve_joiners(self) -> None:
        """Give the newest weights to replicas that joined since they were published; the trainers must be idle."""
        if self._gather([self._trainers[0].call.remote("joiners")])[0]:
            self.on_trainers("publish")

    @property
    def refused(self) -> bool:
        """Whether a replica found what no restart can fix; the next ``take`` or ``await_replicas`` raises that."""
        return self._refusal is not None

    def _raise_refusal(self) -> None:
        """Raise why a replica refused; while trainers are idle and no batch is on its way, so the run can be saved."""
        if self._refusal is not None:
            raise self._refusal

    def evaluate(self) -> Any:
        """Let a replica that runs evaluate; return a reference to the answer, None if no replica runs."""
        running = [name for name, replica in self._replicas.items() if replica.run is not None]
        if not running:
            return None
        answer = self._replicas[running[0]].actor.evaluate.remote()
        self._evaluator = _Evaluator(running[0], answer, time.monotonic())
        return answer

    def watch(self, references: list[Any]) -> list[Any]:
        """Wait for what happens next, for ``POLL_S`` at most; return which ``references`` are ready.

        Meanwhile replace the replicas that died, that are silent or that are late. Raises TrainerDiedError or
        EngineError if it is a trainer or the ledger that is silent.
        """
        self._check_processes()
        runs = {replica.run: name for name, replica in self._replicas.items() if replica.run is not None}
        watched = dict.fromkeys([*references, *runs, *self._joining])
        ready, _ = ray.wait(list(watched), num_returns=1, timeout=POLL_S)
        for reference in ready:
            if reference in runs:
                self._replace(runs[reference], _why_ended(reference))
            elif reference in self._joining:
                self._joined(reference)
        return [reference for reference in ready if reference in references]

    def _check_processes(self) -> None:
        """Look at heartbeats and deadlines, every POLL_S at most, and say what the run waits for."""
        if time.monotonic() - self._checked_s < POLL_S:
            return
        self._checked_s = time.monotonic()
        self._tell_waits()
        for name, reason in self._unresponsive().items():
            if name in self._replicas:
                self._replace(name, reason)
            elif name == _LEDGER:
                raise _no_ledger(reason)
            else:
                raise TrainerDiedError(f"{name}: {reason}")
        for name, reason in self._late_replicas().items():
            self._replace(name, reason)

    def _end(self, name: str, actor: Any) -> None:
        """Kill a process; Ray needs some seconds for one that is frozen."""
        self._heartbeats.forget(name)
        self._waits.forget(name)
        ray.kill(actor)

    def _tell_waits(self) -> None:
        self._heartbeats.ask()
        self._waits.tell(self._heartbeats.silent(), limit_s=self._limits.heartbeat_s)

    def _unresponsive(self) -> dict[str, str]:
        limit_s = self._limits.heartbeat_s
        return {
            name: f"it has not answered for timeouts.heartbeat_s={limit_s:g} s"
            for name, silent_s in self._heartbeats.silent().items()
            if silent_s > limit_s
        }

    def _late_replicas(self) -> dict[str, str]:
        """Return the replicas that answer and make no progress, each with the limit that it has exceeded."""
        late, limits, now_s = {}, self._limits, time.monotonic()
        group_s = self._config.rollout.group_timeout_s
        turn_s = group_s + _TRANSFER_WAITS * (group_s + self._config.weights.timeout_s)  # a turn may hold a transfer
        turns, expired = self._heartbeats.turns(), self.on_ledger("overdue")
        for name, replica in self._replicas.items():
            if replica.incarnation in expired:
                late[name] = f"it held a prompt for more than rollout.group_timeout_s={group_s:g}"
            elif replica.run is None and now_s - replica.started_s > limits.start_s:
                late[name] = f"it was not set up within timeouts.start_s={limits.start_s:g}"
            elif turns.get(name, 0.0) > turn_s:
                late[name] = f"its loop has been in one turn for {turns[name]:.0f} s"
        evaluator = self._evaluator
        if evaluator is not None and now_s - evaluator.began_s > limits.evaluation_s:
            self._evaluator = None
            if evaluator.replica in self._replicas and not ray.wait([evaluator.answer], timeout=0)[0]:
                late[evaluator.replica] = f"its evaluation took timeouts.evaluation_s={limits.evaluation_s:g}"
        return late

    def close(self, *, failed: bool = False) -> None:
        """End every process; those that can still answer release files and memory first.

        If the run ``failed``, raise what the trainers then say: a save in the background may have failed, too.
        """
        goodbyes = [trainer.call.remote("close") for trainer in self._trainers if self._trainers_answer]
        trainers = list(goodbyes)
        for replica in self._replicas.values():
            replica.actor.stop.remote()
            goodbyes += [replica.run] if replica.run is not None else []
        answered = ray.wait(goodbyes, num_returns=len(goodbyes), timeout=GOODBYE_S)[0] if goodbyes else []
        answers = [partial(_raise_error_of, reference) for reference in answered if failed and reference in trainers]
        for actor in [*self._trainers, *(replica.actor for replica in self._replicas.values()), self._ledger]:
            ray.kill(actor)
        self._devices.close()
        attempt_all(*answers)

    # -- what dies ----------------------------------------------------------------------------------------------

    def _gather(
        self, references: list[Any], *, limit_s: float | None = None, key: str = "timeouts.trainer_s"
    ) -> list[Any]:
        """Return the trainers' answers; whatever a survivor says, a dead rank is the cause.

        Raises TrainerDiedError after ``limit_s`` seconds, by default those of the setting ``key``.
        """
        pending, limit_s = list(references), self._limits.trainer_s if limit_s is None else limit_s
        patience = Patience(limit_s)
        while pending:
            if patience.is_over():
                raise TrainerDiedError(f"a rank has not answered a call within {key}={limit_s:g} s")
            for reference in self.watch(pending):
                pending.remove(reference)
                try:
                    value_of(reference)
                except DEATHS as exc:
                    raise TrainerDiedError(_first_line(exc)) from exc
                except (HwrlError, RayTaskError) as exc:
                    death = _death_among(pending)
                    if death is None:
                        raise
                    raise death from exc
        return [value_of(reference) for reference in references]

    def _joined(self, joining: Any) -> None:
        """Let a replica run that is set up; one that died in setting up is replaced, one that cannot be is an error."""
        name = self._joining.pop(joining)
        replica = self._replicas[name]
        try:
            self._devices.prove(name, value_of(joining))
        except DEATHS as exc:
            self._replace(name, _first_line(exc))
            return
        except (HwrlError, RayTaskError) as exc:
            if not replica.replaces:
                raise
            if isinstance(exc, InputChangedError):
                self._refusal = exc
                return
            self._replace(name, f"it could not be set up in another's place: {_first_line(exc)}")
            return
        self._replicas[name] = dataclasses.replace(replica, run=replica.actor.run.remote())

    def _replace(self, name: str, reason: str) -> None:
        replica = self._replicas.pop(name)
        self._devices.forget(name)
        self._joining = {reference: other for reference, other in self._joining.items() if other != name}
        self._end(name, replica.actor)
        lost = self.on_ledger("forget", replica.incarnation)
        self._say(f"rollout {name} ended ({reason}); {lost} prompts go to others, a new replica starts")
        deaths = self._replica_starts - self._config.rollout.replicas + 1
        if deaths > self._config.rollout.max_restarts:
            raise EngineError(
                f"rollout replicas died {deaths} times",
                why=reason,
                fix="mend the cause, or raise rollout.max_restarts; resume=true continues the run",
            )
        self._launch_replica(name)


_LEDGER = "the ledger"


def _actor_class(kind: type) -> Any:
    """Return ``kind`` as Ray's actor, whose ``alive`` answers beside every other call."""
    return ray.remote(concurrency_groups={GROUP: 1})(kind)


def _no_ledger(why: str) -> EngineError:
    return EngineError(
        "the ledger of prompts died",
        why=why,
        fix="resume=true continues from the last checkpoint, if there is one",
    )


def value_of(reference: Any) -> Any:
    """Return the value; an hwrl error from another process comes out as itself."""
    try:
        return ray.get(reference)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            raise exc.cause from exc
        raise


def _raise_error_of(reference: Any) -> None:
    with contextlib.suppress(RayError):  # it is dead, or its error is none of hwrl's
        value_of(reference)


def _death_among(references: list[Any]) -> TrainerDiedError | None:
    if not references:
        return None
    ready, _ = ray.wait(references, num_returns=len(references), timeout=DEATH_NOTICE_S)
    for reference in ready:
        try:
            ray.get(reference)
        except DEATHS as exc:
            return TrainerDiedError(_first_line(exc))
        except RayTaskError:
            continue
    return None


def _why_ended(reference: Any) -> str:
    try:
        ray.get(reference)
    except DEATHS as exc:
        return _first_line(exc)
    except RayTaskError as exc:
        if isinstance(exc.cause, HwrlError):
            return f"{exc.cause.what}: {exc.cause.why}"
        return [line for line in str(exc).splitlines() if line.strip()][-1].strip()
    return "it returned"


def _first_line(exc: Exception) -> str:
    return next((line.strip() for line in str(exc).splitlines() if line.strip()), type(exc).__name__)


def _newest_step(config: Config) -> int:
    """Return the step that a resume will start from, so that sampling does not repeat what it drew before."""
    directory = config.dir / "checkpoints"
    complete = find_checkpoints(directory)[0] if config.resume and directory.is_dir() else []
    return max((info.step for info in complete), default=0)
