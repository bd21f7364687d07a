"""A run from start to end, on one page: everything else in ``hwrl.run`` is called from here.

All of this is in the driver. ``fleet.trainers.all.step(...)`` calls ``TrainerRank.step`` in the trainers' processes.
"""

from __future__ import annotations

import sys
from functools import partial

from hwrl.discovery import get_backend
from hwrl.errors import attempt_all
from hwrl.interfaces import RunStatus
from hwrl.run.cluster.ray_session import ray_cluster
from hwrl.run.config import Config
from hwrl.run.evaluation import Evaluations
from hwrl.run.fleet import Fleet, TrainerDiedError
from hwrl.run.identity import identify_inputs
from hwrl.run.inputs import is_local
from hwrl.run.interrupts import Interrupts
from hwrl.run.progress import Progress
from hwrl.run.report import PlainView, RecordedView, StepRecorder
from hwrl.run.report.summary import Summary, summarise
from hwrl.run.run_directory import claimed_directory


def run_training(config: Config, view: PlainView) -> Summary:
    """Train a model with the settings in ``config``, show the progress in ``view``, and return a summary.

    Blocks until all steps are done, or until a signal (:class:`Interrupts`) ends the run after the current step, with a
    checkpoint. A second signal raises KeyboardInterrupt. So does the first one while there is nothing to save: during
    the start, and while the run returns to a checkpoint. Raises the HwrlError that restarting a process cannot fix.
    """
    get_backend()  # raises, before anything starts, if no backend can run here
    # No signal handler may raise while Ray starts: in a fork hook Python drops the error, and processes stay.
    interrupts = Interrupts(view.log, defer_message="stopping as soon as Ray has started" if is_local() else None)
    with (
        claimed_directory(config),
        RecordedView(view, config.dir) as recorded,
        interrupts,
        ray_cluster(config, log=recorded.log),
    ):
        interrupts.defer_message = None
        interrupts.install_handlers()  # again: Ray's C++ code has replaced our handler of SIGTERM
        fleet = Fleet(config, inputs=identify_inputs(config), log=recorded.log)
        summary = RunLoop(config, recorded, interrupts, fleet=fleet).run()
        recorded.end(summary.text)
        return summary


class RunLoop:
    """The loop over the training steps of one run. ``interrupts`` ends it between two steps.

    If a trainer rank dies, all ranks start again from the last checkpoint. Whatever error ends the run, finished steps
    are saved first. All processes end in any case; errors meanwhile are notes on the first one.
    """

    def __init__(self, config: Config, view: PlainView | RecordedView, interrupts: Interrupts, *, fleet: Fleet) -> None:
        self._config, self._view, self._interrupts, self._fleet = config, view, interrupts, fleet
        self._recorder = StepRecorder(config, log=view.log)
        self._progress = Progress(config, fleet, self._recorder, interrupts)
        self._evaluations = Evaluations(config, fleet, self._recorder, interrupts)
        self._status: RunStatus = "finished"
        self._has_begun = False

    def run(self) -> Summary:
        """Train until all steps are done or a signal is pending, end all processes, and return the summary."""
        try:
            return self._train()
        except BaseException as exc:
            self._status = "interrupted" if isinstance(exc, KeyboardInterrupt) else "failed"
            self._progress.save_before(exc)
            for sentence in self._fleet.replicas.repeated_deaths():
                exc.add_note(sentence)
            raise
        finally:
            error = sys.exception()  # a second signal, if it has ended the save
            ends = [partial(self._fleet.close, after=error), partial(self._recorder.close, self._status)]
            attempt_all(*ends, after=error)

    def _train(self) -> Summary:
        config, fleet, progress = self._config, self._fleet, self._progress
        death: TrainerDiedError | None = None
        while True:
            try:
                self._start(death)
                while progress.step < config.train.steps and not self._interrupts.pending:
                    with self._recorder.waiting_for_batch():
                        groups, batch = fleet.take_batch(progress.version, stop=lambda: self._interrupts.pending)
                    if batch is None:
                        break
                    progress.begin_step(batch)
                    outcome = fleet.trainers.all.step(groups)  # it also publishes the weights, if a version is due
                    progress.finish_step()
                    self._recorder.add(progress.step, outcome, batch, fleet=fleet)
                    self._evaluations.collect()
                    if progress.is_due(config.eval.every_steps):
                        self._evaluations.begin()
                    if progress.is_due(config.checkpoint.save_every_steps):
                        progress.save()
                    self._view.show(self._recorder.line)
                    fleet.waits.note_progress()
                return self._finish()
            except TrainerDiedError as error:
                death = error

    def _start(self, death: TrainerDiedError | None) -> None:
        """Start all processes, and load the newest checkpoint if the run resumes. After a ``death``: the trainers."""
        fleet, progress, interrupts = self._fleet, self._progress, self._interrupts
        if death is None:
            fleet.launch()
            progress.restore(resume=self._config.resume)
        elif interrupts.pending:
            raise KeyboardInterrupt from death
        else:
            interrupts.defer_message = None
            fleet.restart_trainers(death)
            progress.restore(resume=True)
            fleet.trainers.all.send_weights()
        if not self._has_begun:
            fleet.begin(progress.step)
            if progress.step == 0 and self._config.eval.before_training:
                self._evaluations.begin()
                self._evaluations.wait()
            self._recorder.start_clock()
            self._has_begun = True
        interrupts.defer_message = "stopping after the step under way, if any; all finished steps will be saved"

    def _finish(self) -> Summary:
        """Save the last steps, evaluate the last weights, write the model, and return the summary.

        After a signal only the checkpoint is saved. A later run with ``resume=true`` evaluates and writes the model. A
        signal during the export changes nothing: the run has finished.
        """
        fleet, progress, interrupts = self._fleet, self._progress, self._interrupts
        self._evaluations.collect()
        progress.save_last()
        if not interrupts.pending:
            interrupts.defer_message = "stopping without the last evaluation; all steps are saved"
            self._evaluations.evaluate_last(progress, self._view)
        if interrupts.pending:
            self._status = "interrupted"
        else:
            interrupts.defer_message = "stopping as soon as the model is written"
            fleet.trainers.all.export_model()
        progress.finish_save()
        fleet.trainers.all.close()
        faults, interrupted = fleet.replicas.repeated_deaths(), self._status == "interrupted"
        return summarise(self._config, self._recorder.report.history, interrupted=interrupted, faults=faults)
