"""A run from start to end: the loop over the training steps, with its evaluations and checkpoints.

All of this happens in the driver. A step goes from :meth:`Pipeline._train_step` to the fleet (``fleet.py``,
``run_ledger.py``, ``trainers.py``). From there the actors' handles (``handles.py``) call the methods of ``actors.py``,
which run in other processes.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

from hwrl.discovery import get_backend
from hwrl.errors import CheckpointSaveError, attempt_all, note
from hwrl.interfaces import PromptGroup, RunStatus
from hwrl.run.cluster.ray_session import ray_cluster
from hwrl.run.config import TENSORBOARD, Config
from hwrl.run.fleet.fleet import Fleet
from hwrl.run.fleet.sharded_evaluation import ShardedEvaluation
from hwrl.run.fleet.trainers import TrainerDiedError
from hwrl.run.identity import identify_inputs
from hwrl.run.inputs import is_local, sampling_warning
from hwrl.run.interrupts import Interrupts
from hwrl.run.processes.actors import EMPTY_LEDGER, BatchInfo, RestoredRun, StepOutcome
from hwrl.run.processes.answers import Answer
from hwrl.run.report import Metrics, RecordedView, RunReport, StepRates, View
from hwrl.run.report.bottleneck import BATCH_WAIT
from hwrl.run.report.summary import Summary, summarise, unknown_goals
from hwrl.run.report.traces import StepTimes, finish_traces
from hwrl.run.report.trackers import start_trackers
from hwrl.run.run_directory import claimed_directory


def run_training(config: Config, view: View) -> Summary:
    """Train a model with the settings in ``config``, show the progress in ``view``, and return a summary.

    Blocks until all steps are done, or until the process gets SIGINT (Ctrl-C), SIGTERM or SIGHUP. Such a signal ends
    the run after the current step, with a checkpoint. A second signal raises KeyboardInterrupt. So does the first one
    while there is nothing to save: during the start, and while the run returns to a checkpoint. An error that
    restarting a process cannot fix is raised as an HwrlError.
    """
    get_backend()  # raises, before anything starts, if no backend can run here
    # Do not raise in a signal handler while Ray starts: in a fork hook Python discards the exception, and some of Ray's
    # processes would stay.
    interrupts = Interrupts(view.log, defer_message="stopping as soon as Ray has started" if is_local() else None)
    with (
        claimed_directory(config),
        RecordedView(view, config.dir) as recorded_view,
        interrupts,
        ray_cluster(config, log=recorded_view.log),
    ):
        interrupts.defer_message = None
        interrupts.install_handlers()  # again: Ray's C++ code has replaced our handler of SIGTERM
        fleet = Fleet(config, inputs=identify_inputs(config), log=recorded_view.log)
        pipeline = Pipeline(config, recorded_view, interrupts, fleet=fleet)
        try:
            summary = pipeline.run()
        except BaseException as error:
            pipeline.close(after=error)
            raise
        pipeline.close()
        recorded_view.end(summary.text)
        return summary


class Pipeline:
    """The loop over the training steps of one run.

    - ``run()`` starts all processes, loads the newest checkpoint if the run resumes, and trains until all steps are
      done or a signal is pending. If a trainer rank dies, at any point, all ranks start again from the last checkpoint.
    - ``close()`` ends all processes, also after an error. Errors during ``close()`` are added as notes to the error
      that ended the run.

    Whatever error ends the run, ``close()`` first saves the finished steps if the trainers are alive and between two
    steps. After an error in a step they are, if the step had not begun to change the weights. Only a KeyboardInterrupt
    saves nothing. A note on the error names the checkpoint, or the number of the lost steps and the reason.
    """

    def __init__(self, config: Config, view: View | RecordedView, interrupts: Interrupts, *, fleet: Fleet) -> None:
        self._config, self._view, self._interrupts, self._fleet = config, view, interrupts, fleet
        self._opened_report: RunReport | None = None
        self._rates = StepRates([], devices=fleet.device_counts)
        self._evaluation: ShardedEvaluation | None = None
        self._evaluated: tuple[int, int] | None = None  # incarnation and version of the newest finished evaluation
        self._saved_step = self._first_step = 0
        self._ledger_state = EMPTY_LEDGER  # of the last finished step
        self._open_batch: BatchInfo | None = None  # of the step that is being trained
        self._started_s = 0.0
        self._has_begun = self._was_interrupted = False
        self.step = 0

    def run(self) -> Summary:
        """Train until all steps are done or a signal is pending; return the summary."""
        try:
            self._start()
        except TrainerDiedError as cause:
            self._recover(cause)
        while True:
            try:
                self._begin()
                while self.step < self._config.train.steps and not self._interrupts.pending:
                    self._interrupts.defer_message = (
                        "stopping after the step that is being trained, if any; all finished steps will be saved"
                    )
                    self._train_step()
                return self._finish()
            except TrainerDiedError as cause:
                self._recover(cause)

    def close(self, *, after: BaseException | None = None) -> None:
        """End all processes and close the files. ``after`` is the error that ended the run, None if it ended well.

        After an error it first saves the finished steps.
        """
        try:
            if after is not None:
                self._save_before(after)
                for sentence in self._fleet.replicas.repeated_deaths():
                    after.add_note(sentence)
        finally:
            actions = [lambda: self._fleet.close(after=after)]
            if self._opened_report is not None:
                actions.append(partial(self._opened_report.close, self._status(after)))
            attempt_all(*actions, after=after)

    def _status(self, error: BaseException | None) -> RunStatus:
        if error is not None and not isinstance(error, KeyboardInterrupt):
            return "failed"
        return "interrupted" if error is not None or self._was_interrupted else "finished"

    # -- start --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        self._started_s = time.perf_counter()
        self._view.log(f"building {self._fleet.describe_size()}")
        if (warning := sampling_warning(self._config)) is not None:
            self._view.log(warning)
        self._fleet.launch()
        self._restore_or_reset(resume=self._config.resume)

    def _begin(self) -> None:
        """Wait for the replicas, send them the first weights, and log the run's processes. Later calls do nothing."""
        if self._has_begun:
            return
        self._fleet.wait_for_replicas()
        self._fleet.trainers.send_weights()
        self._view.log(self._fleet.describe_placement())
        next_step = (
            f"the next step is {self._first_step}" if self.step < self._config.train.steps else "no step follows"
        )
        self._view.log(
            f"{self._fleet.describe()}, ready after {time.perf_counter() - self._started_s:.1f} s; "
            f"run directory {self._config.dir}; {next_step}"
        )
        if self.step == 0 and self._config.eval.before_training:
            self._begin_evaluation()
            self._wait_for_evaluation()
        self._report.start_clock()
        self._rates.start_clock()
        self._has_begun = True

    def _restore_or_reset(self, *, resume: bool) -> None:
        """Set the trainers, the ledger, the report and the rates to the newest checkpoint if ``resume``.

        Without ``resume``, or without a checkpoint, set them to step 0. A report that is open, of the time before a
        trainer's death, is closed as "interrupted": its trackers see the rest as a resumed run.
        """
        restored = self._fleet.trainers.restore() if resume else None
        self.step = self._saved_step = 0 if restored is None else restored.step
        self._first_step = self.step + 1
        self._ledger_state = EMPTY_LEDGER if restored is None else restored.ledger
        self._open_batch = None
        self._fleet.ledger.load_state_dict(self._ledger_state, self._fleet.trainers.incarnation)
        if resume:
            self._log_restored(restored)
        earlier = () if self._opened_report is None else self._opened_report.trackers
        if self._opened_report is not None:
            self._opened_report.close("interrupted", waits=False)
        self._opened_report = RunReport(
            self._config.dir,
            log=self._view.log,
            resume_step=self.step,
            tensorboard=TENSORBOARD in self._config.report.trackers,
            trackers=start_trackers(self._config, resume_step=self.step, log=self._view.log, earlier=earlier),
        )
        self._rates.go_back(self._report.history)

    def _log_restored(self, restored: RestoredRun | None) -> None:
        if restored is None:
            setting = f"checkpoint.save_every_steps={self._config.checkpoint.save_every_steps}"
            self._view.log(f"no checkpoint in {self._config.dir} ({setting}): starting at step 0")
            return
        for path, reason in restored.skipped:
            self._view.log(f"skipped {path}: {reason}")
        for sentence in restored.changed:
            self._view.log(sentence)
        self._view.log(f"resumed after step {restored.step}")

    def _recover(self, cause: Exception) -> None:
        """Restart the trainers from the newest checkpoint and send its weights. Retry if a trainer dies meanwhile.

        Raises EngineError after ``train.max_restarts`` restarts.
        """
        if self._interrupts.pending:
            raise KeyboardInterrupt from cause
        self._interrupts.defer_message = None
        # This ends all leases and admits no prompts until the checkpoint's state is loaded. Replicas without weights
        # make no progress meanwhile, and must not count as stuck.
        self._fleet.ledger.load_state_dict(EMPTY_LEDGER, self._fleet.trainers.incarnation + 1)
        while True:
            try:
                self._fleet.trainers.restart(cause)
                self._restore_or_reset(resume=True)
                self._fleet.trainers.send_weights()
                return
            except TrainerDiedError as again:
                cause = again

    @property
    def _report(self) -> RunReport:
        assert self._opened_report is not None, "_start opens it before the first use"
        return self._opened_report

    @property
    def _version(self) -> int:
        """The newest weight version that was due. The trainer counts in the same way: ``AsyncTrainer.version``."""
        return self.step // self._config.async_training.trigger_parameter_sync_step

    @property
    def _has_unpublished_weights(self) -> bool:
        """Whether steps have been trained since the newest version was sent."""
        is_synced = self.step % self._config.async_training.trigger_parameter_sync_step == 0
        return not is_synced and self.step >= self._first_step  # a restored trainer sends its weights at once

    # -- one step -----------------------------------------------------------------------------------------------

    def _train_step(self) -> None:
        """Do one training step; then start an evaluation and save a checkpoint if they are due.

        Return without a step if a signal is pending before the batch has arrived.
        """
        version, requested_s = self._version, time.perf_counter()
        groups, info = self._take_batch(version)
        if info is None:
            return
        began_unix_s, waited_s = time.time(), time.perf_counter() - requested_s
        self._open_batch = info
        outcome = self._fleet.trainers.step(groups)
        self._finish_batch(info)
        line = self._record_step(outcome, info, waited_s=waited_s)
        self._trace_step(outcome, info, version=version, began_unix_s=began_unix_s)
        profiled = self._config.train.profile_steps
        if profiled is not None and self.step == profiled[1]:
            self._finish_profile()
        line = self._collect_evaluation() or line
        if _is_due(self.step, self._config.eval.every_steps):
            self._begin_evaluation()
        if _is_due(self.step, self._config.checkpoint.save_every_steps):
            self._save()
        self._view.show(line)
        self._fleet.note_progress()

    def _take_batch(self, version: int) -> tuple[Answer[list[PromptGroup]], BatchInfo | None]:
        """Wait for the batch of the next step; return it with its description, None if a signal came first.

        Sends weights to new receivers meanwhile.
        """
        groups, answer = self._fleet.request_batch(self._config.train.batch_groups, version)
        with self._fleet.waiting_for("a batch of finished prompts"):
            while answer not in self._fleet.watch([answer]):
                if self._interrupts.pending:
                    self._fleet.ledger.abandon_take()
                    break
                self._fleet.serve_new_receivers()
        return groups, self._fleet.ledger.value_of(answer)  # a batch that was given before is trained on

    def _finish_batch(self, info: BatchInfo) -> None:
        """Count the step on the batch ``info`` as finished."""
        self.step += 1
        self._ledger_state, self._open_batch = info.ledger, None

    def _record_step(self, outcome: StepOutcome, info: BatchInfo, *, waited_s: float) -> Metrics:
        self._log_failed(info.untrained.failed)
        self._rates.devices = self._fleet.device_counts
        rates = {**self._rates.metrics(outcome.metrics, info), BATCH_WAIT: waited_s}
        rates["rollout/deaths"] = float(self._fleet.replicas.deaths.total())
        line = self._report.add(
            self.step,
            {**outcome.metrics, **rates},
            prompts=info.sequence_numbers,
            untrained=info.untrained,
            samples=outcome.samples,
        )
        if self.step == self._first_step:
            sets = [data_set.name for data_set in self._config.data.eval_sets]
            for sentence in unknown_goals(self._config.goals, line, eval_sets=sets):
                self._view.log(sentence)
        return line

    def _trace_step(self, outcome: StepOutcome, info: BatchInfo, *, version: int, began_unix_s: float) -> None:
        """Send the traces of the step's traced prompts, if it has any, to the trackers."""
        if not info.spans:
            return
        published, rest = divmod(self.step, self._config.async_training.trigger_parameter_sync_step)
        times = StepTimes(
            self.step,
            version,
            began_unix_s,
            time.time(),
            published=None if rest else published,
            sync_s=outcome.metrics.get("timing_s/sync", 0.0),
            critic_s=outcome.metrics.get("timing_s/critic", 0.0),
        )
        self._report.trace(list(finish_traces(info.spans, times)))

    def _log_failed(self, failed: Mapping[int, str]) -> None:
        """Log the skipped prompts of a step, with the reason of the first one."""
        if not failed:
            return
        number, reason = next(iter(failed.items()))
        others = f"; {len(failed) - 1} more failed as well" if len(failed) > 1 else ""
        self._view.log(f"prompt {number} failed and is skipped ({reason}){others}")

    def _finish_profile(self) -> None:
        """Let the trainer write its profile, if it records one; log where it is, or why there is none."""
        if self._config.train.profile_steps is None:
            return
        if (message := self._fleet.trainers.finish_profile()) is not None:
            self._view.log(message)

    def _save(self) -> None:
        """Save a checkpoint, and add its metrics to the line of the saved step."""
        self._report.sync()  # metrics.jsonl must hold every step of a checkpoint
        metrics = self._fleet.trainers.save(self._ledger_state)
        self._saved_step = self.step
        self._report.amend(metrics)

    def _save_before(self, error: BaseException) -> None:
        """Save a checkpoint of the finished steps before ``error`` ends the run; note the outcome on ``error``.

        If the trainers are in the middle of a step, it cannot be saved. Nor is it after a KeyboardInterrupt: the user
        wants the end at once.
        """
        if self._saved_step == self.step and self._open_batch is None:
            return
        self._interrupts.defer_message = "the finished steps are being saved"
        reason, before = "the run was to stop at once", self._saved_step
        if not isinstance(error, KeyboardInterrupt):
            try:
                reason = self._try_to_save()
            except TrainerDiedError as exc:
                reason = f"a trainer died: {exc}"
            except Exception as exc:  # noqa: BLE001 - it becomes a note on the error that ended the run
                note(error, exc)
                reason = "no checkpoint could be saved"
        directory = self._config.dir / "checkpoints"
        if self._saved_step < self.step:
            lost = f"{self.step - self._saved_step} finished step(s) were lost, because {reason}"
            error.add_note(f"then {lost}; the last checkpoint in {directory} is of step {self._saved_step}")
        elif self._saved_step > before:
            error.add_note(f"then step {self.step} was saved in {directory}; resume=true continues from it")

    def _try_to_save(self) -> str:
        """Save the finished steps and wait for the checkpoint. Return the reason if that is not possible, else ""."""
        finished, batch = self._fleet.trainers.finished_step(), self._open_batch
        if batch is not None and finished == self.step + 1:  # an error after the step: in sending its weights, say
            self._finish_batch(batch)
        else:
            batch = None
        if finished != self.step:
            return "the step under way had changed the weights in part"
        if self._saved_step < self.step:
            try:
                self._fleet.trainers.save(self._ledger_state)
            except CheckpointSaveError:  # perhaps the error of the save before, in the background
                self._fleet.trainers.save(self._ledger_state)
            self._fleet.trainers.close()  # waits for a save in the background
            self._saved_step = self.step
        if batch is not None:
            self._report.add(self.step, {}, prompts=batch.sequence_numbers, untrained=batch.untrained)
        return ""

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _begin_evaluation(self, *, alone: bool = False) -> None:
        """Start an evaluation on the running replicas. Does nothing while an earlier one still runs."""
        if self._config.data.eval is not None and self._evaluation is None:
            self._evaluation = self._fleet.replicas.evaluate(alone=alone)

    def _wait_for_evaluation(self) -> Metrics | None:
        """Wait for a running evaluation or a signal; then return the result of :meth:`_collect_evaluation`.

        The trainers must be idle, because a replacement of a dead replica needs weights from them.
        """
        with self._fleet.waiting_for("the evaluation"):
            while self._evaluation is not None and not self._interrupts.pending:
                self._evaluation.poll()
                if self._evaluation.is_over:
                    break
                self._fleet.watch([])
                self._fleet.serve_new_receivers()
        return self._collect_evaluation()

    def _collect_evaluation(self) -> Metrics | None:
        """Add a finished evaluation to the newest line and return the line; None without one. Does not block.

        The newest line may belong to a later step than the evaluated weights: ``eval/version`` has their version.
        """
        if self._evaluation is None:
            return None
        self._evaluation.poll()
        if not self._evaluation.is_over:
            return None
        finished, self._evaluation = self._evaluation, None
        evaluation = finished.result()
        if evaluation is None:
            self._view.log("an evaluation was lost because its replicas died")
            return None
        if evaluation.incarnation != self._fleet.trainers.incarnation:
            self._view.log("an evaluation is discarded: its weights were lost in the restart of the trainer")
            return None
        self._evaluated = evaluation.incarnation, evaluation.version
        metrics = evaluation.metrics(pass_reward=self._config.eval.pass_reward)
        metrics = {f"eval/{name}": value for name, value in metrics.items()}
        return self._report.amend({**metrics, "eval/version": float(evaluation.version)})

    # -- end ----------------------------------------------------------------------------------------------------

    def _finish(self) -> Summary:
        """Save the last steps, evaluate the last weights, write the model, and return the summary.

        After a signal only the checkpoint is saved. A later run with ``resume=true`` evaluates and writes the model. A
        signal during the export changes nothing: the run has finished.
        """
        self._collect_evaluation()
        if self._saved_step != self.step:
            self._save()
        self._finish_profile()  # the run may end before the last step of train.profile_steps
        if not self._interrupts.pending:
            self._interrupts.defer_message = "stopping without the last evaluation; all steps are saved"
            self._evaluate_last_weights()
        self._was_interrupted = self._interrupts.pending
        if not self._was_interrupted:
            self._interrupts.defer_message = "stopping as soon as the model is written"
            self._fleet.trainers.export_model()
        self._fleet.trainers.close()
        faults = self._fleet.replicas.repeated_deaths()
        return summarise(self._config, self._report.history, interrupted=self._was_interrupted, faults=faults)

    def _evaluate_last_weights(self) -> None:
        """Evaluate the weights of the last step, unless a regular evaluation has done so.

        If the evaluation is lost, another one starts, up to ``_EVALUATION_TRIES`` in all.
        """
        if self._config.data.eval is None:
            return
        self._wait_for_evaluation()
        if self._last_weights_are_evaluated:
            self._view.show(self._report.history[-1])
            return
        if self._has_unpublished_weights and not self._interrupts.pending:
            self._fleet.trainers.publish_last_weights()
        for _ in range(_EVALUATION_TRIES):
            self._begin_last_evaluation()
            line = self._wait_for_evaluation()
            if line is not None:
                self._view.show(line)
            if line is not None or self._interrupts.pending:
                return
            self._fleet.watch([])  # the driver may learn of the replica's death a little after the loss
        self._view.log(f"the evaluation of the last weights failed {_EVALUATION_TRIES} times; the run ends without it")

    @property
    def _last_weights_are_evaluated(self) -> bool:
        newest = self._fleet.trainers.incarnation, self._version
        return self._evaluated == newest and not self._has_unpublished_weights

    def _begin_last_evaluation(self) -> None:
        """Start an evaluation as soon as a replica runs. Return without one on a signal."""
        with self._fleet.waiting_for("a replica for the evaluation"):
            while self._evaluation is None and not self._interrupts.pending:
                self._begin_evaluation(alone=True)
                if self._evaluation is None:
                    self._fleet.watch([])


_EVALUATION_TRIES = 3
"""The maximum number of attempts to evaluate the last weights."""


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
