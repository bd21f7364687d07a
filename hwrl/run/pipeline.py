"""A run from start to end: the loop over the steps, with evaluation, checkpoints, and what follows a death."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

from hwrl.discovery import get_backend
from hwrl.errors import DataError, EngineError, HwrlError, InputChangedError, RunDirectoryError, attempt_all, note
from hwrl.rollout.evaluator import Evaluation
from hwrl.run.actors import Taken
from hwrl.run.cluster import ray_cluster
from hwrl.run.config import Config
from hwrl.run.figures import FigureWindow
from hwrl.run.fleet import DEATHS, Fleet, TrainerDiedError, value_of
from hwrl.run.identity import identify_inputs
from hwrl.run.inputs import is_local
from hwrl.run.interrupts import Interrupts
from hwrl.run.report import RunReport, View
from hwrl.run.summary import Summary, claimed_directory, summarise, unknown_goals


def run_training(config: Config, view: View) -> Summary:
    """Train as ``config`` says, showing progress in ``view``; return how it ended.

    Blocks until the steps are done, or until Ctrl-C, SIGTERM or SIGHUP, which ends the run cleanly after the current
    step, with a checkpoint. Raises an HwrlError for what cannot be mended by a restart, and KeyboardInterrupt for a
    second such signal, or for the first while there is nothing to save: in starting, and in going back to a checkpoint.
    """
    get_backend()  # before anything is started: it may say that nothing can run here
    # Nothing is raised where Ray starts: Python would drop it in a hook of fork, and half a Ray would be left behind.
    interrupts = Interrupts(view.say, answer="stopping as soon as Ray has started" if is_local() else None)
    with claimed_directory(config), interrupts, ray_cluster(config, say=view.say):
        interrupts.answer = None
        interrupts.listen()  # again: Ray's C++ part, too, has set a handler for SIGTERM
        fleet = Fleet(config, inputs=identify_inputs(config), say=view.say)
        pipeline = Pipeline(config, view, interrupts, fleet=fleet)
        try:
            summary = pipeline.run()
        except BaseException as error:
            pipeline.close(after=error)
            raise
        pipeline.close()
        return summary


class Pipeline:
    """The loop over the steps of one run.

    run()    starts everything, resumes, steps until done or until a signal is pending, and sums up;
             a trainer that dies takes the run back to its last checkpoint, wherever that happens
    close()  ends every process, also after errors; the run's own error comes first, those of closing are noted on it
    """

    def __init__(self, config: Config, view: View, interrupts: Interrupts, *, fleet: Fleet) -> None:
        self._config, self._view, self._interrupts, self._fleet = config, view, interrupts, fleet
        self._report: RunReport | None = None
        self._window = FigureWindow([])
        self._evaluating: Any = None
        self._saved_step = self._first_step = 0
        self.step = 0

    def run(self) -> Summary:
        """See the class."""
        try:
            self._start()
        except TrainerDiedError as cause:
            self._recover(cause)
        while True:
            try:
                while self.step < self._config.train.steps and not self._interrupts.pending:
                    condition = "" if self.step >= self._first_step else "if it has begun, "
                    self._interrupts.answer = f"stopping after this step, {condition}with a checkpoint"
                    self._advance()
                return self._finish(interrupted=self.step < self._config.train.steps)
            except TrainerDiedError as cause:
                self._recover(cause)
            except (RunDirectoryError, InputChangedError, DataError) as error:
                self._save_before(error)
                raise

    def close(self, *, after: BaseException | None = None) -> None:
        """End every process and close the files; ``after`` is the error that ended the run."""
        acts = [lambda: self._fleet.close(failed=after is not None)]
        if self._report is not None:
            acts.append(self._report.close)
        attempt_all(*acts, after=after)

    # -- start --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        started_s = time.perf_counter()
        self._view.say(f"building {self._fleet.size}")
        self._fleet.launch()
        self._restore(resume=self._config.resume)
        self._fleet.await_replicas()
        self._fleet.on_trainers("publish")
        steps_left = self.step < self._config.train.steps
        self._view.say(
            f"{self._fleet.describe()}, ready after {time.perf_counter() - started_s:.1f} s; "
            f"run directory {self._config.dir}; {f'step {self._first_step}' if steps_left else 'no step'} follows"
        )
        self._figures.start_clock()

    def _restore(self, *, resume: bool) -> None:
        """Load the newest checkpoint into trainers and ledger if asked to; open the report from that step on."""
        found = self._fleet.on_trainers("resume")[0] if resume else None
        self.step = self._saved_step = 0 if found is None else int(found["step"])
        self._first_step = self.step + 1
        state = _BEGINNING if found is None else found["ledger"]
        self._fleet.on_ledger("load_state_dict", state, self._fleet.incarnation)
        if found is not None:
            for path, reason in found["skipped"]:
                self._view.say(f"skipped {path}: {reason}")
            for sentence in found["changed"]:
                self._view.say(sentence)
            self._view.say(f"resumed after step {self.step}")
        elif resume:
            every = f"checkpoint.save_every_steps={self._config.checkpoint.save_every_steps}"
            self._view.say(f"no checkpoint in {self._config.dir} ({every}): beginning at step 0")
        if self._report is not None:
            self._report.close()
        self._report = RunReport(self._config.dir, say=self._view.say, resume_step=self.step)
        self._window = FigureWindow(self._report.history)

    def _recover(self, cause: Exception) -> None:
        """Start the trainers again until they live long enough to publish the checkpoint's weights."""
        if self._interrupts.pending:
            raise KeyboardInterrupt from cause
        self._interrupts.answer = None
        while True:
            try:
                self._fleet.relaunch_trainers(cause)
                self._restore(resume=True)
                self._fleet.on_trainers("publish")
                return
            except TrainerDiedError as again:
                cause = again

    @property
    def _figures(self) -> RunReport:
        assert self._report is not None, "_restore opens it before anything is reported"
        return self._report

    # -- one step -----------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Do one training step, with evaluation and checkpoint when they are due; return early if interrupted."""
        version = self.step // self._config.async_training.trigger_parameter_sync_step
        groups, note = self._fleet.take(self._config.train.batch_groups, version)
        if not self._wait_for_batch(note):
            self._fleet.on_ledger("abandon_take")
        taken: Taken | None = self._fleet.ledger_value(note)
        if taken is None:  # abandoned; if it is there after all, the ledger counts it as trained
            return
        figures = self._fleet.on_trainers("step", groups)[0]
        self.step += 1
        line = self._figures.add(
            self.step, {**figures, **self._window.figures(figures, taken)}, prompts=taken.sequence_numbers
        )
        if self.step == self._first_step:
            evaluates = self._config.data.eval is not None
            for sentence in unknown_goals(self._config.goals, line, evaluates=evaluates):
                self._view.say(sentence)
        line = self._collect_evaluation() or line
        if _is_due(self.step, self._config.eval.every_steps):
            self._begin_evaluation()
        if _is_due(self.step, self._config.checkpoint.save_every_steps):
            self._save()
        self._view.show(line)

    def _wait_for_batch(self, note: Any) -> bool:
        """Block until the batch is there, looking after replicas that join or hang; False if the run is to end."""
        with self._fleet.waiting_for("a batch of finished prompts"):
            while note not in self._fleet.watch([note]):
                if self._interrupts.pending or self._fleet.refused:
                    return False
                self._fleet.serve_joiners()
        return True

    def _save(self) -> None:
        """Save a checkpoint; its figures go on the line of the step that is saved."""
        self._figures.sync()  # a checkpoint must not outlive the lines of its steps
        figures = self._fleet.on_trainers("save", self._fleet.on_ledger("state_dict"))[0]
        self._saved_step = self.step
        self._figures.amend(figures)

    def _save_before(self, error: HwrlError) -> None:
        """Save what was trained since the last checkpoint before ``error`` ends the run; note on it how that went.

        The trainers are idle. Nothing is written to the report: it may be what cannot be written.
        """
        if self._saved_step == self.step:
            return
        try:
            self._fleet.on_trainers("save", self._fleet.on_ledger("state_dict"))
            self._fleet.on_trainers("close")  # waits for a save in the background
        except (TrainerDiedError, HwrlError, RayError) as exc:
            note(error, exc)
        else:
            error.add_note(f"then a checkpoint of step {self.step} was saved, which resume=true continues from")

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _begin_evaluation(self) -> None:
        if self._config.data.eval is not None and self._evaluating is None:
            self._evaluating = self._fleet.evaluate()

    def _collect_evaluation(self, *, block: bool = False) -> dict[str, float] | None:
        """Add a finished evaluation to the newest line and return that line; None if there is none.

        With ``block`` wait for one that is under way; the trainers must be idle, for the replica may ask for weights.
        """
        with self._fleet.waiting_for("the evaluation"):
            while block and self._evaluating is not None and not self._fleet.watch([self._evaluating]):
                self._fleet.serve_joiners()
        if self._evaluating is None or not ray.wait([self._evaluating], timeout=0)[0]:
            return None
        reference, self._evaluating = self._evaluating, None
        try:
            evaluation: Evaluation = value_of(reference)
        except (*DEATHS, EngineError):  # it died, or its rollouter has ended
            self._view.say("an evaluation was lost with its replica")
            return None
        if evaluation.incarnation != self._fleet.incarnation:
            self._view.say("an evaluation of weights that were lost with a trainer does not count")
            return None
        figures = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        return self._figures.amend({**figures, "eval/version": float(evaluation.version)})

    # -- end ----------------------------------------------------------------------------------------------------

    def _finish(self, *, interrupted: bool) -> Summary:
        """Evaluate and save for the last time, write the model for transformers, and sum up."""
        self._collect_evaluation(block=not interrupted)
        if self._saved_step != self.step:
            self._save()
        if not interrupted:
            self._evaluate_finally()
            self._fleet.on_trainers("export")
        self._fleet.on_trainers("close")
        return summarise(self._config, self._figures.history, interrupted=interrupted)

    def _evaluate_finally(self) -> None:
        """Evaluate the last weights; a replica that dies over it is replaced, and the next one tries."""
        line = None
        while line is None and self._config.data.eval is not None:
            self._begin_evaluation()
            if self._evaluating is None:
                self._fleet.await_replicas()
                self._fleet.serve_joiners()
            line = self._collect_evaluation(block=True)
        if line is not None:
            self._view.show(line)


_BEGINNING = {"version": 0, "trained": 0, "next": 0, "owed": []}
"""The ledger's state before anything was issued."""


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
