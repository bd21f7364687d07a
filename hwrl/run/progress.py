"""How far a run is: its finished steps, the ledger's state after them, and the last checkpoint."""

from __future__ import annotations

from contextlib import suppress

from hwrl.errors import CheckpointSaveError, note
from hwrl.run.config import Config
from hwrl.run.fleet import Fleet, TrainerDiedError
from hwrl.run.interrupts import Interrupts
from hwrl.run.ledger import EMPTY_LEDGER, BatchInfo, LedgerActor
from hwrl.run.report import StepRecorder
from hwrl.run.trainer import RestoredRun


class Progress:
    """Counts the finished steps of a run, and saves and restores them.

    ``begin_step`` comes before each step of the trainers, ``finish_step`` after it. Between two steps, ``save`` writes
    a checkpoint of the trainers' state with the ledger's. ``save_before`` does so before an error ends the run.
    """

    def __init__(self, config: Config, fleet: Fleet, recorder: StepRecorder, interrupts: Interrupts) -> None:
        self._config, self._fleet, self._recorder, self._interrupts = config, fleet, recorder, interrupts
        self._ledger_state = EMPTY_LEDGER  # of the last finished step
        self._open_batch: BatchInfo | None = None  # of the step that is being trained
        self.step = self.saved_step = self._durable_step = self._restored_step = 0

    @property
    def version(self) -> int:
        """The newest weight version that was due. The trainer counts in the same way: ``AsyncTrainer.version``."""
        return self.step // self._config.async_training.trigger_parameter_sync_step

    @property
    def has_unpublished_weights(self) -> bool:
        """Whether steps have been trained since the newest version was sent."""
        is_synced = self.step % self._config.async_training.trigger_parameter_sync_step == 0
        return not is_synced and self.step > self._restored_step  # a restored trainer sends its weights at once

    def is_due(self, every_steps: int) -> bool:
        """Return whether the last step is one of every ``every_steps``; never if that is 0."""
        return every_steps > 0 and self.step % every_steps == 0

    def begin_step(self, batch: BatchInfo) -> None:
        """Note that the next step is trained on ``batch``."""
        self._open_batch = batch

    def finish_step(self) -> None:
        """Count the step on the batch of :meth:`begin_step` as finished."""
        assert self._open_batch is not None, "begin_step comes first"
        self.step += 1
        self._ledger_state, self._open_batch = self._open_batch.ledger, None

    def restore(self, *, resume: bool) -> None:
        """Set the trainers, the ledger and the records to the newest checkpoint if ``resume``.

        Without ``resume``, or without a checkpoint, set them to step 0.
        """
        restored = self._fleet.trainers.all.restore() if resume else None
        self.step = self.saved_step = self._durable_step = 0 if restored is None else restored.step
        self._restored_step = self.step
        self._ledger_state = EMPTY_LEDGER if restored is None else restored.ledger
        self._open_batch = None
        incarnation = self._fleet.trainers.incarnation
        self._fleet.ledger.ask(LedgerActor.load_state_dict, self._ledger_state, incarnation)
        if resume:
            self._log_restored(restored)
        self._recorder.open(self.step)

    def _log_restored(self, restored: RestoredRun | None) -> None:
        log = self._recorder.log
        if restored is None:
            setting = f"checkpoint.save_every_steps={self._config.checkpoint.save_every_steps}"
            log(f"no checkpoint in {self._config.dir} ({setting}): starting at step 0")
            return
        for path, reason in restored.skipped:
            log(f"skipped {path}: {reason}")
        for sentence in restored.changed:
            log(sentence)
        log(f"resumed after step {restored.step}")

    def save(self) -> None:
        """Save a checkpoint, and add its metrics to the line of the saved step."""
        self._recorder.report.sync()  # metrics.jsonl must hold every step of a checkpoint
        try:
            metrics = self._fleet.trainers.all.save(self._ledger_state)  # waits for the save before
        except CheckpointSaveError:  # perhaps of that one, in the background
            self.saved_step = self._durable_step
            raise
        self._durable_step = self.saved_step if self._config.checkpoint.async_save else self.step
        self.saved_step = self.step
        self._recorder.report.amend(metrics)

    def save_last(self) -> None:
        """Save a checkpoint of the last step if it has none."""
        if self.saved_step != self.step:
            self.save()

    def finish_save(self) -> None:
        """Wait for a save in the background. If it has failed, count its step as not saved, and raise its error."""
        if self._durable_step == self.saved_step:
            return
        try:
            self._fleet.trainers.all.wait_for_save()
        except CheckpointSaveError:
            self.saved_step = self._durable_step
            raise
        self._durable_step = self.saved_step

    def save_before(self, error: BaseException) -> None:
        """Save a checkpoint of the finished steps before ``error`` ends the run; note the outcome on ``error``.

        The trainers must be alive and between two steps. After an error in a step they are, if the step had not begun
        to change the weights. After a KeyboardInterrupt nothing is saved: the user wants the end at once. The note
        names the checkpoint, or the number of the lost steps and the reason.
        """
        if self._durable_step == self.step and self._open_batch is None:
            return
        self._interrupts.defer_message = "the finished steps are being saved"
        reason, before = "the run was to stop at once", self._durable_step
        if not isinstance(error, KeyboardInterrupt):
            try:
                reason = self._try_to_save()
            except TrainerDiedError as exc:
                reason = f"a trainer died: {exc}"
            except Exception as exc:  # noqa: BLE001 - it becomes a note on the error that ended the run
                note(error, exc)
                reason = "no checkpoint could be saved"
        directory = self._config.dir / "checkpoints"
        if self.saved_step < self.step:
            lost = f"{self.step - self.saved_step} finished step(s) were lost, because {reason}"
            error.add_note(f"then {lost}; the last checkpoint in {directory} is of step {self.saved_step}")
        elif self.saved_step > before:
            error.add_note(f"then step {self.step} was saved in {directory}; resume=true continues from it")

    def _try_to_save(self) -> str:
        """Save the finished steps and wait for the checkpoint. Return the reason if that is not possible, else ""."""
        finished, batch = self._fleet.trainers.idle_step(), self._open_batch
        if batch is not None and finished == self.step + 1:  # an error after the step: in sending its weights, say
            self.finish_step()
        else:
            batch = None
        if finished != self.step:
            back = "the step under way had changed the weights in part"
            return back if finished is None else f"the trainers had returned to step {finished}"
        with suppress(CheckpointSaveError):
            self.finish_save()
        if self.saved_step < self.step:
            try:
                self._fleet.trainers.all.save(self._ledger_state)
            except CheckpointSaveError:  # a disk may be full for a moment only
                self._fleet.trainers.all.save(self._ledger_state)
            self._fleet.trainers.all.close()  # waits for a save in the background
            self.saved_step = self._durable_step = self.step
        if batch is not None:
            self._recorder.report.add(self.step, {}, prompts=batch.sequence_numbers, untrained=batch.untrained)
        return ""
