"""Whatever ends a run, the finished steps are saved first; with a stand-in for the processes."""

from __future__ import annotations

from copy import copy
from pathlib import Path
from typing import Any

import pytest

from hwrl.errors import CheckpointSaveError, DataError, EngineError, with_notes
from hwrl.run.fleet import TrainerDiedError
from hwrl.run.interrupts import Interrupts
from hwrl.run.ledger import BatchInfo
from hwrl.run.report import read_metrics
from hwrl.run.trainer import StepOutcome
from tests.support.fleet_with_ledger import FleetWithLedger, trained_prompts
from tests.support.two_step_run import CHECKPOINT, train


class EndsInStepTwo(FleetWithLedger):
    """After the first step, the call ``place`` raises ``error``. ``place`` "trained" is the end of the second step."""

    def __init__(self, home: Path, place: str = "", error: BaseException | None = None) -> None:
        super().__init__(home)
        self._place, self._raises = place, error

    def _meet(self, place: str) -> None:
        if self._step and place == self._place and self._raises is not None:
            error, self._raises = self._raises, None
            raise error

    def request_batch(self, version: int) -> tuple[list[Any], str]:
        self._meet("request_batch")
        return super().request_batch(version)

    def watch(self, answers: list[Any]) -> list[Any]:
        self._meet("watch")
        return super().watch(answers)

    def value_of(self, info: str) -> BatchInfo | None:
        info_of_batch = super().value_of(info)  # the ledger counts it as trained
        self._meet("value_of")
        return info_of_batch

    def step(self, groups: list[Any]) -> StepOutcome:
        self._meet("step")
        outcome = super().step(groups)
        if self._step == 2:
            self._meet("trained")
        return outcome

    def note_progress(self) -> None:
        self._meet("note_progress")


UNSAVED = {"train": {"steps": 2, "batch_groups": 2}, "checkpoint": {"save_every_steps": 0}}
ENDINGS = [DataError("no data"), EngineError("a replica died"), RuntimeError("of hwrl itself"), SystemExit(3)]


@pytest.mark.parametrize("place", ["request_batch", "watch", "value_of", "step", "trained", "note_progress"])
@pytest.mark.parametrize("error", ENDINGS, ids=lambda error: type(error).__name__)
def test_whatever_ends_a_run_the_finished_steps_are_saved_first(
    tmp_path: Path, place: str, error: BaseException
) -> None:
    with pytest.raises(type(error)) as raised:
        train(tmp_path, EndsInStepTwo(tmp_path, place, copy(error)), Interrupts(), **UNSAVED)
    saved = 2 if place == "trained" else 1
    assert f"then step {saved} was saved in {tmp_path}/checkpoints" in with_notes(raised.value)
    train(tmp_path, EndsInStepTwo(tmp_path), Interrupts(), resume=True, **UNSAVED)
    assert sorted(trained_prompts(tmp_path)) == [0, 1, 2, 3]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


class StepInPart(EndsInStepTwo):
    """An error ends the second step after a part of its updates."""

    def idle_step(self) -> int | None:
        return None


class TrainerIsDead(EndsInStepTwo):
    """The trainer has died as well."""

    def idle_step(self) -> int | None:
        raise TrainerDiedError("rank 0: killed")


@pytest.mark.parametrize(
    ("fleet_class", "error", "reason"),
    [
        (StepInPart, DataError("the loss"), "the step under way had changed the weights in part"),
        (TrainerIsDead, DataError("the loss"), "a trainer died: rank 0: killed"),
        (EndsInStepTwo, KeyboardInterrupt(), "the run was to stop at once"),
    ],
)
def test_an_error_tells_the_steps_that_could_not_be_saved(
    tmp_path: Path, fleet_class: type[EndsInStepTwo], error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)) as raised:
        train(tmp_path, fleet_class(tmp_path, "step", error), Interrupts(), **UNSAVED)
    notes = with_notes(raised.value)
    assert f"then 1 finished step(s) were lost, because {reason}; the last checkpoint in" in notes
    assert not (tmp_path / CHECKPOINT).exists()


class LosesOneSave(EndsInStepTwo):
    """Saves in the background. The first save of ``step`` fails there; the next call that waits for it raises."""

    def __init__(self, home: Path, step: int, place: str = "", error: BaseException | None = None) -> None:
        super().__init__(home, place, error)
        self._loses: int | None = step
        self._lost: CheckpointSaveError | None = None

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        self.wait_for_save()
        if self._step != self._loses:
            return super().save(ledger)
        self._loses, self._lost = None, CheckpointSaveError(f"step {self._step} was not saved", why="no space left")
        return {"checkpoint/blocked_s": 0.5}

    def wait_for_save(self) -> None:
        error, self._lost = self._lost, None
        if error is not None:
            raise error


IN_BACKGROUND = {"checkpoint": {"save_every_steps": 1, "async_save": True}}


@pytest.mark.parametrize("place", ["watch", "step", "note_progress"])
def test_a_step_whose_save_failed_in_the_background_is_saved_again_before_an_error_ends_the_run(
    tmp_path: Path, place: str
) -> None:
    with pytest.raises(DataError, match="no data") as raised:
        train(tmp_path, LosesOneSave(tmp_path, 1, place, DataError("no data")), Interrupts(), **IN_BACKGROUND)
    assert f"then step 1 was saved in {tmp_path}/checkpoints" in with_notes(raised.value)
    assert (tmp_path / CHECKPOINT).read_text() == "1"


@pytest.mark.parametrize("step", [1, 2])
def test_a_save_that_failed_in_the_background_ends_the_run_with_its_error_and_all_steps_saved(
    tmp_path: Path, step: int
) -> None:
    with pytest.raises(CheckpointSaveError, match=f"step {step} was not saved") as raised:
        train(tmp_path, LosesOneSave(tmp_path, step), Interrupts(), **IN_BACKGROUND)
    assert f"then step 2 was saved in {tmp_path}/checkpoints" in with_notes(raised.value)
    assert (tmp_path / CHECKPOINT).read_text() == "2"
