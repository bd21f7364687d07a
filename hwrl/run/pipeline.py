"""A run from start to end: places the actors with Ray, drives the steps, and replaces what dies."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import ray
import yaml
from ray.exceptions import RayActorError, RayTaskError

from hwrl.comm import serve_store, store_address
from hwrl.errors import ConfigError, EngineError, HwrlError
from hwrl.registry import get_backend
from hwrl.rollout.rollouter import Evaluation
from hwrl.run.actors import LedgerActor, RolloutActor, Taken, TrainActor
from hwrl.run.config import Config, dump_config
from hwrl.run.figures import FigureWindow
from hwrl.run.report import METRICS, RunReport, View

CONFIG = "config.yaml"
POLL_S = 1.0

FIXED_KEYS = (
    "seed",
    "model.path",
    "data.train",
    "rollout.n",
    "train.batch_groups",
    "async_training.trigger_parameter_sync_step",
)
"""What a resumed run may not change: the accounts of prompts and versions rest on it."""


@dataclass(frozen=True)
class Summary:
    """How a run ended. ``missed_goals`` says which goals were not reached, one sentence each."""

    steps_done: int
    finished: bool
    last: dict[str, float]
    missed_goals: list[str]
    text: str

    @property
    def succeeded(self) -> bool:
        """Whether all steps were done and all goals reached."""
        return self.finished and not self.missed_goals


def run_training(config: Config, view: View) -> Summary:
    """Train as ``config`` says, showing progress in ``view``; return how it ended.

    Blocks until the steps are done, or until Ctrl-C, which ends the run cleanly after the current step, with a
    checkpoint. Raises an HwrlError for what cannot be mended by a restart.
    """
    _claim_directory(config)
    with _interruptible() as interrupted, _cluster(config):
        pipeline = Pipeline(config, view)
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
    advance()  one training step, with evaluation and checkpoint when they are due
    finish()   last evaluation, checkpoint, export, summary
    close()    ends every actor; also after errors
    """

    def __init__(self, config: Config, view: View) -> None:
        self._config, self._view = config, view
        self._backend = get_backend()
        self._store = serve_store()
        self._store_address = store_address(self._store)
        self._ledger: Any = None
        self._trainers: list[Any] = []
        self._replicas: dict[str, _Replica] = {}
        self._joining: dict[Any, str] = {}
        self._evaluating: Any = None
        self._report: RunReport | None = None
        self._window = FigureWindow()
        self._trainer_starts = self._replica_starts = 0
        self._saved_step = -1
        self.step = 0

    # -- start --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Bring everything up and publish the first weights."""
        started_s = time.perf_counter()
        self._ledger = ray.remote(LedgerActor).options(num_cpus=0).remote(self._config)
        self._launch_trainers()
        for index in range(self._config.rollout.replicas):
            self._launch_replica(f"replica-{index}")
        self._restore(resume=self._config.resume)
        self._await_joining()
        self._publish()
        self._view.say(
            f"hwrl on {self._backend.info.name}: {len(self._trainers)} trainer rank(s), {len(self._replicas)} rollout "
            f"replica(s), ready after {time.perf_counter() - started_s:.1f} s; run directory {self._config.dir}"
        )
        assert self._report is not None  # _restore opened it
        self._report.start_clock()

    def _launch_trainers(self) -> None:
        options = self._backend.devices.ray_options(1)
        incarnation, self._trainer_starts = self._trainer_starts, self._trainer_starts + 1
        self._trainers = [
            ray.remote(TrainActor)
            .options(**options)
            .remote(
                self._config,
                backend=self._backend.info.name,
                rank=rank,
                store_address=self._store_address,
                incarnation=incarnation,
            )
            for rank in range(self._config.train.ranks)
        ]

    def _launch_replica(self, name: str) -> None:
        """Start the replica ``name``. One that takes a dead namesake's place also ends the wait for that one's part
        in a weight transfer.
        """
        start, self._replica_starts = self._replica_starts, self._replica_starts + 1
        actor = (
            ray.remote(RolloutActor)
            .options(max_concurrency=4, **self._backend.devices.ray_options(1))
            .remote(
                self._config,
                backend=self._backend.info.name,
                replica=name,
                seed=self._config.seed * 1000 + start,
                store_address=self._store_address,
                ledger=self._ledger,
            )
        )
        self._replicas[name] = _Replica(actor, actor.run.remote())
        self._joining[actor.ready.remote()] = name

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
        self._window = FigureWindow()

    # -- one step -----------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Do one training step. A trainer that dies is replaced, and the run goes back to its last checkpoint."""
        try:
            self._advance()
        except RayActorError as exc:
            self._recover_trainers(exc)

    def _advance(self) -> None:
        groups, note = self._ledger.take.options(num_returns=2).remote(self._config.train.batch_groups, self._version)
        self._wait_for(note, trainers_idle=True)
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

    def _wait_for(self, reference: Any, *, trainers_idle: bool = False) -> None:
        """Block until ``reference`` is there, replacing replicas that die meanwhile.

        With ``trainers_idle``, replicas that join meanwhile get the newest weights.
        """
        while True:
            runs = {replica.run: name for name, replica in self._replicas.items()}
            watched = dict.fromkeys([reference, *runs, *self._joining])
            ready, _ = ray.wait(list(watched), num_returns=1, timeout=POLL_S)
            if reference in ready:
                return
            for other in ready:
                if other in runs:
                    self._replace_replica(runs[other], other)
                elif other in self._joining:
                    self._joined(other)
            if trainers_idle and self._get(self._trainers[0].joiners.remote()):
                self._publish()

    def _on_trainers(self, method: str, *args: Any) -> list[Any]:
        references = [getattr(trainer, method).remote(*args) for trainer in self._trainers]
        for reference in references:
            self._wait_for(reference)
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

    def _joined(self, ready: Any) -> None:
        name = self._joining.pop(ready)
        if name in self._replicas:  # else it died while it joined, and its run has told so
            self._get(ready)

    def _await_joining(self) -> None:
        while self._joining:
            first = next(iter(self._joining))
            self._wait_for(first)
            if first in self._joining:
                self._joined(first)

    def _replace_replica(self, name: str, run: Any) -> None:
        replica = self._replicas.pop(name)
        self._joining = {ready: other for ready, other in self._joining.items() if other != name}
        reason = _why_ended(run)
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
        self._launch_trainers()
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
        last = self._report.history[-1] if self._report.history else {}
        missed = [] if interrupted else missed_goals(self._config.goals, last)
        text = _summary_text(self._config, last, self.step, interrupted=interrupted, missed=missed)
        return Summary(self.step, not interrupted, last, missed, text)

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
    run: Any


_BEGINNING = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before anything was issued."""


def missed_goals(goals: dict[str, float], figures: dict[str, float]) -> list[str]:
    """Return a sentence for each goal that ``figures`` does not reach.

    >>> missed_goals({"reward/mean": 0.9}, {"reward/mean": 0.95})
    []
    >>> missed_goals({"eval/exact": 0.85}, {"eval/exact": 0.5})
    ['eval/exact is 0.5, the goal is 0.85']
    """
    missed = []
    for name, goal in goals.items():
        reached = figures.get(name)
        if reached is None or reached < goal:
            missed.append(f"{name} is {'absent' if reached is None else f'{reached:.4g}'}, the goal is {goal:.4g}")
    return missed


def _summary_text(config: Config, last: dict[str, float], step: int, *, interrupted: bool, missed: list[str]) -> str:
    how = "interrupted" if interrupted else "done"
    lines = [f"{how} after step {step} of {config.train.steps}, {last.get('time_s', 0.0):.0f} s of training"]
    names = ("reward/mean", "eval/reward", "eval/exact", "staleness/mean", "weights/version", "response/tokens_total")
    lines += [f"  {name:<22} {last[name]:.4g}" for name in names if name in last]
    if last:
        lines.append(f"  trainer idle {last['trainer/idle_ratio']:.0%}, rollout idle {last['rollout/idle_ratio']:.0%}")
    lines.append(f"  metrics {config.dir / METRICS}, curve {config.dir / 'reward.png'}")
    lines += [f"goal missed: {sentence}" for sentence in missed]
    if interrupted:
        lines.append("continue with: the same command and resume=true")
    return "\n".join(lines)


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _why_ended(run: Any) -> str:
    try:
        ray.get(run)
    except (RayActorError, RayTaskError) as exc:
        lines = [line for line in str(exc).splitlines() if line.strip()]
        return lines[-1].strip() if isinstance(exc, RayTaskError) else lines[0].strip()
    return "it returned"


def _claim_directory(config: Config) -> None:
    """Write the resolved configuration into the run directory; refuse one that holds another run."""
    path = config.dir / CONFIG
    if path.exists() and (config.dir / METRICS).exists():
        _check_same_run(config, yaml.safe_load(path.read_text(encoding="utf-8")))
    config.dir.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_config(config), encoding="utf-8")


def _check_same_run(config: Config, before: dict[str, Any]) -> None:
    if not config.resume:
        raise ConfigError(
            f"{config.dir} already holds a run",
            why="its metrics and checkpoints would be mixed with the new run's",
            fix="add resume=true to continue it, choose another dir=…, or delete the directory",
        )
    now = yaml.safe_load(dump_config(config))
    changed = [key for key in FIXED_KEYS if _at(now, key) != _at(before, key)]
    if changed:
        raise ConfigError(
            f"cannot resume {config.dir} with another {', '.join(changed)}",
            why="; ".join(f"{key} was {_at(before, key)!r} and is {_at(now, key)!r}" for key in changed),
            fix="resume with the old values, or begin a new run in another dir=…",
        )


def _at(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part, {}) if isinstance(tree, dict) else {}
    return tree


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
