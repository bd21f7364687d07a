"""A run from start to end: places the actors with Ray, drives the steps, and replaces what dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError, EngineError, HwrlError
from hwrl.registry import get_backend
from hwrl.rollout.rollouter import Evaluation
from hwrl.run.actors import LedgerActor, RolloutActor, Taken, TrainActor
from hwrl.run.config import Config
from hwrl.run.figures import FigureWindow
from hwrl.run.report import RunReport, View
from hwrl.run.summary import Summary, claim_directory, summarise

POLL_S = 1.0


def run_training(config: Config, view: View) -> Summary:
    """Train as ``config`` says, showing progress in ``view``; return how it ended.

    Blocks until the steps are done, or until Ctrl-C, which ends the run cleanly after the current step, with a
    checkpoint. Raises an HwrlError for what cannot be mended by a restart.
    """
    get_backend()  # before anything is started: it may say that nothing can run here
    claim_directory(config)
    with _interruptible() as interrupted, _cluster(config):
        pipeline = Pipeline(config, view, interrupted=interrupted)
        try:
            pipeline.start()
            while pipeline.step < config.train.steps and not interrupted:
                pipeline.advance()
            return pipeline.finish(interrupted=bool(interrupted))
        finally:
            pipeline.close()


class Pipeline:
    """The actors of one run and the loop over its steps.

    start()    ledger, trainers, replicas; resume; first weights
    advance()  one training step, with evaluation and checkpoint when they are due; none if ``interrupted`` fills up
    finish()   last evaluation, checkpoint, export, summary
    close()    ends every actor; also after errors
    """

    def __init__(self, config: Config, view: View, *, interrupted: Sequence[int]) -> None:
        self._config, self._view, self._interrupted = config, view, interrupted
        self._backend = get_backend()
        self._store = serve_store()
        self._store_address = store_address(self._store)
        self._ledger: Any = None
        self._trainers: list[Any] = []
        self._replicas: dict[str, _Replica] = {}
        self._joining: dict[Any, str] = {}
        self._evaluating: Any = None
        self._report: RunReport | None = None
        self._window = FigureWindow([])
        self._trainer_starts = self._replica_starts = 0
        self._saved_step = -1
        self.step = 0

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up and publish the first weights."""
        started_s = time.perf_counter()
        self._check_room()
        self._ledger = ray.remote(LedgerActor).options(num_cpus=0).remote(self._config)
        set_up = self._launch_trainers()
        for index in range(self._config.rollout.replicas):
            self._launch_replica(f"replica-{index}")
        self._wait_for_all(set_up)
        for reference in set_up:
            self._get(reference)
        self._restore(resume=self._config.resume)
        self._wait_for_all(list(self._joining))
        self._publish()
        self._view.say(
            f"hwrl on {self._backend.info.name}: {len(self._trainers)} trainer rank(s), {len(self._replicas)} rollout "
            f"replica(s), ready after {time.perf_counter() - started_s:.1f} s; run directory {self._config.dir}"
        )
        assert self._report is not None  # _restore opened it
        self._report.start_clock()

    def _check_room(self) -> None:
        """Raise if the cluster has fewer devices than actors: Ray would wait for more without a word."""
        resource = self._backend.devices.ray_resource
        ranks, replicas = self._config.train.ranks, self._config.rollout.replicas
        present = ray.cluster_resources().get(resource, 0)
        if resource is None or ranks + replicas <= present:
            return
        raise ConfigError(
            f"the run needs {ranks + replicas} devices ({resource})",
            why=f"train.ranks={ranks} and rollout.replicas={replicas} take one each, and the cluster has {present:g}",
            fix="use fewer ranks or replicas, or add machines to the cluster that RAY_ADDRESS names",
        )

    def _launch_trainers(self) -> list[Any]:
        """Make the trainer's ranks and begin to set them up; return what to wait for."""
        options = self._backend.devices.ray_options(1)
        incarnation, self._trainer_starts = self._trainer_starts, self._trainer_starts + 1
        self._trainers = [ray.remote(TrainActor).options(**options).remote() for _ in range(self._config.train.ranks)]
        return [
            trainer.set_up.remote(
                self._config,
                backend=self._backend.info.name,
                rank=rank,
                store_address=self._store_address,
                incarnation=incarnation,
            )
            for rank, trainer in enumerate(self._trainers)
        ]

    def _launch_replica(self, name: str) -> None:
        """Start the replica ``name``. One that takes a dead namesake's place also ends the wait for that one's part
        in a weight transfer.
        """
        start, self._replica_starts = self._replica_starts, self._replica_starts + 1
        options = self._backend.devices.ray_options(1)
        actor = ray.remote(RolloutActor).options(max_concurrency=4, **options).remote()
        self._replicas[name] = _Replica(actor)
        joining = actor.set_up.remote(
            self._config,
            backend=self._backend.info.name,
            replica=name,
            seed=self._config.seed * 1000 + start,
            store_address=self._store_address,
            ledger=self._ledger,
        )
        self._joining[joining] = name

    def _restore(self, *, resume: bool) -> None:
        """Load the newest checkpoint into trainers and ledger if asked to; open the report from that step on."""
        found = self._on_trainers("resume")[0] if resume else None
        self.step = 0 if found is None else int(found["step"])
        if found is not None:
            ray.get(self._ledger.load_state_dict.remote(found["ledger"]))
            for reason in found["skipped"]:
                self._view.say(f"skipped a checkpoint: {reason}")
            self._view.say(f"resumed after step {self.step}")
        elif resume:
            self._view.say(f"no checkpoint in {self._config.dir}: beginning at step 0")
        self._saved_step = self.step
        if self._report is not None:
            self._report.close()
        self._report = RunReport(self._config.dir, resume_step=self.step)
        self._window = FigureWindow(self._report.history)

    # -- one step -----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do one training step. A trainer that dies is replaced, and the run goes back to its last checkpoint."""
        try:
            self._advance()
        except RayActorError as exc:
            self._recover_trainers(exc)

    def _advance(self) -> None:
        groups, note = self._ledger.take.options(num_returns=2).remote(self._config.train.batch_groups, self._version)
        if not self._wait_for_batch(note):
            return
        taken: Taken = self._get(note)
        figures = self._on_trainers("step", groups)[0]
        self.step += 1
        assert self._report is not None  # start() opened it
        line = self._report.add(
            self.step, {**figures, **self._window.figures(figures, taken)}, prompts=taken.sequence_numbers
        )
        line = self._collect_evaluation() or line
        if _is_due(self.step, self._config.eval.every_steps):
            self._begin_evaluation()
        if _is_due(self.step, self._config.checkpoint.save_every_steps):
            self._save()
        self._view.show(line)

    @property
    def _version(self) -> int:
        return self.step // self._config.async_training.trigger_parameter_sync_step

    def _wait_for_batch(self, reference: Any) -> bool:
        """Block until ``reference`` is there, giving joining replicas the newest weights; False if interrupted."""
        while not self._watch(reference):
            if self._interrupted:
                return False
            if self._get(self._trainers[0].call.remote("joiners")):
                self._publish()
        return True

    def _wait_for(self, reference: Any) -> None:
        while not self._watch(reference):
            pass

    def _watch(self, reference: Any) -> bool:
        """Wait for what happens next, for ``POLL_S`` at most; replace replicas that died; is ``reference`` there?"""
        runs = {replica.run: name for name, replica in self._replicas.items() if replica.run is not None}
        watched = dict.fromkeys([reference, *runs, *self._joining])
        ready, _ = ray.wait(list(watched), num_returns=1, timeout=POLL_S)
        for other in ready:
            if other in runs:
                self._replace_replica(runs[other], other)
            elif other in self._joining:
                self._joined(other)
        return reference in ready

    def _wait_for_all(self, references: list[Any]) -> None:
        for reference in references:
            self._wait_for(reference)

    def _on_trainers(self, method: str, *args: Any) -> list[Any]:
        references = [trainer.call.remote(method, *args) for trainer in self._trainers]
        self._wait_for_all(references)
        return [self._get(reference) for reference in references]

    def _publish(self) -> None:
        self._on_trainers("publish")

    def _save(self) -> None:
        state = self._ledger.state_dict.remote()
        self._on_trainers("save", state)
        self._saved_step = self.step

    @staticmethod
    def _get(reference: Any) -> Any:
        """Return the value; an hwrl error from another process comes out as itself."""
        try:
            return ray.get(reference)
        except RayTaskError as exc:
            if isinstance(exc.cause, HwrlError):
                raise exc.cause from exc
            raise

    # -- what dies ----------------------------------------------------------------------------------------------

    def _joined(self, joining: Any) -> None:
        """Let a replica run that is set up; one that died in setting up is replaced, one that cannot be is an error."""
        name = self._joining.pop(joining)
        try:
            self._get(joining)
        except RayActorError:
            self._replace_replica(name, joining)
            return
        actor = self._replicas[name].actor
        self._replicas[name] = _Replica(actor, actor.run.remote())

    def _replace_replica(self, name: str, ended: Any) -> None:
        replica = self._replicas.pop(name)
        reason = _why_ended(ended)
        ray.kill(replica.actor)
        lost = ray.get(self._ledger.forget.remote(name))
        self._view.say(f"rollout {name} ended ({reason}); {lost} prompts go to others, a new replica starts")
        deaths = self._replica_starts - self._config.rollout.replicas + 1
        if deaths > self._config.rollout.max_restarts:
            raise EngineError(
                f"rollout replicas died {deaths} times",
                why=reason,
                fix="mend the cause, or raise rollout.max_restarts; resume=true continues the run",
            )
        if self._evaluating is not None:
            self._evaluating = None
            self._view.say("an evaluation was lost with the replica")
        self._launch_replica(name)

    def _recover_trainers(self, cause: RayActorError) -> None:
        reason = str(cause).splitlines()[0]
        if self._trainer_starts > self._config.train.max_restarts:
            raise EngineError(
                f"the trainer died {self._trainer_starts} times",
                why=reason,
                fix="mend the cause, or raise train.max_restarts; resume=true continues the run",
            ) from cause
        self._view.say(f"a trainer died ({reason}); starting again from the last checkpoint")
        for trainer in self._trainers:
            ray.kill(trainer)
        self._wait_for_all(self._launch_trainers())
        ray.get(self._ledger.load_state_dict.remote(_BEGINNING))
        self._restore(resume=True)
        self._publish()

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        if self._config.data.eval is None or self._evaluating is not None:
            return
        actor = next(iter(self._replicas.values())).actor
        self._evaluating = actor.evaluate.remote()

    def _collect_evaluation(self, *, block: bool = False) -> dict[str, float] | None:
        """Add a finished evaluation to the newest line and return that line; None if there is none."""
        if block and self._evaluating is not None:
            self._wait_for(self._evaluating)
        if self._evaluating is None or not ray.wait([self._evaluating], timeout=0)[0]:
            return None
        evaluation: Evaluation = self._get(self._evaluating)
        self._evaluating = None
        assert self._report is not None  # start() opened it
        figures = {f"eval/{name}": value for name, value in evaluation.figures.items()}
        return self._report.amend({**figures, "eval/version": float(evaluation.version)})

    # -- end ----------------------------------------------------------------------------------------------------

    def finish(self, *, interrupted: bool) -> Summary:
        """Evaluate and save for the last time, write the model for transformers, and sum up."""
        self._collect_evaluation(block=True)
        if not interrupted:
            self._begin_evaluation()
            line = self._collect_evaluation(block=True)
            if line is not None:
                self._view.show(line)
        if self._saved_step != self.step:
            self._save()
        if not interrupted:
            self._on_trainers("export")
        self._on_trainers("close")
        assert self._report is not None  # start() opened it
        return summarise(self._config, self._report.history, interrupted=interrupted)

    def close(self) -> None:
        """End every actor and close the files."""
        for replica in self._replicas.values():
            replica.actor.stop.remote()
        for actor in [*self._trainers, *(replica.actor for replica in self._replicas.values()), self._ledger]:
            if actor is not None:
                ray.kill(actor)
        if self._report is not None:
            self._report.close()


@dataclass(frozen=True)
class _Replica:
    actor: Any
    run: Any = None  # not before it is set up


_BEGINNING = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before anything was issued."""


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _why_ended(reference: Any) -> str:
    try:
        ray.get(reference)
    except (RayActorError, RayTaskError) as exc:
        lines = [line for line in str(exc).splitlines() if line.strip()]
        return lines[-1].strip() if isinstance(exc, RayTaskError) else lines[0].strip()
    return "it returned"


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of raising; a second one raises KeyboardInterrupt."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _cluster(config: Config) -> Iterator[None]:
    """Join the Ray cluster that RAY_ADDRESS names, or start one on this machine, with room for the run's actors."""
    options: dict[str, Any] = {}
    if "RAY_ADDRESS" not in os.environ:
        actors = config.train.ranks + config.rollout.replicas
        options = {"num_cpus": max(actors, os.cpu_count() or 1), "include_dashboard": False}
    ray.init(log_to_driver=False, configure_logging=False, namespace=f"hwrl-{Path(config.dir).name}", **options)
    try:
        yield
    finally:
        ray.shutdown()
