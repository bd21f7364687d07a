"""The loop over the steps, with a stand-in for the processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hwrl.checkpoint import DurableFS
from hwrl.rollout import EvaluatedPrompt, Evaluation, UntrainedPrompts
from hwrl.run.fleet import TrainerDiedError
from hwrl.run.interrupts import Interrupts
from hwrl.run.ledger import BatchInfo
from hwrl.run.report import PROMPTS, read_metrics
from hwrl.run.trainer import RestoredRun, StepOutcome
from hwrl.user_code import load_function
from tests.support.finished_groups import finished
from tests.support.fleet_with_ledger import FleetWithLedger, trained_prompts
from tests.support.two_step_run import CHECKPOINT, StandInFleet, train


class BatchInTheLastMoment(StandInFleet):
    """No batch comes before a signal. Then the ledger has, or has not, given one before the run abandons it."""

    def __init__(self, home: Path, interrupts: Interrupts, *, given: bool) -> None:
        super().__init__(home, DurableFS())
        self._interrupts, self._given = interrupts, given

    def watch(self, references: list[Any]) -> list[Any]:
        self._interrupts.pending = True
        return []

    def value_of(self, info: str) -> BatchInfo | None:
        return super().value_of(info) if self._given else None


@pytest.mark.parametrize("given", [False, True])
def test_a_batch_that_the_ledger_gave_before_the_run_was_interrupted_is_trained_on(tmp_path: Path, given: bool) -> None:
    interrupts = Interrupts()
    train(tmp_path, BatchInTheLastMoment(tmp_path, interrupts, given=given), interrupts)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1] * given
    assert (tmp_path / CHECKPOINT).exists() == given


class TrainerDiesInStepTwo(StandInFleet):
    """The trainer dies once, after the first step. The replica lives on: it generates for 10 s before each batch."""

    died = False
    batches = 0

    def value_of(self, info: str) -> BatchInfo | None:
        self.batches += 1
        return BatchInfo([self._step + 1], {}, {"replica-0#0": {"idle_s": 0.0, "generate_s": 10.0 * self.batches}})

    def step(self, groups: list[Any]) -> StepOutcome:
        if self._step == 1 and not self.died:
            self.died = True
            raise TrainerDiedError("killed")
        return super().step(groups)

    def restart(self, cause: Exception) -> None:
        pass

    def restore(self) -> RestoredRun:
        return RestoredRun(1, {}, [], [])


def test_the_first_line_after_a_trainers_death_has_no_totals_from_before_the_last_line(tmp_path: Path) -> None:
    train(tmp_path, TrainerDiesInStepTwo(tmp_path, DurableFS()), Interrupts())
    assert [line["rollout/generate_s"] for line in read_metrics(tmp_path)] == [10.0, 20.0], "not 30.0"


class TrainerRestartsSlowly(FleetWithLedger):
    """The trainer dies in the first step, and its restart takes a day. A replica then has two unfinished prompts."""

    restarts = 0

    def request_batch(self, version: int) -> tuple[list[Any], str]:
        if self.restarts:
            return super().request_batch(version)
        self._prompts.advance(version)
        first, second, *_ = self._prompts.lease(4, replica="replica-0#0", now_s=0.0)
        for lease in (first, second):
            self._prompts.complete(finished(lease))
        self._taken = [group.sequence_number for group in self._prompts.take(2) or []]
        return [], "info"

    def step(self, groups: list[Any]) -> StepOutcome:
        if not self.restarts:
            raise TrainerDiedError("killed")
        return super().step(groups)

    def restart(self, cause: Exception) -> None:
        self.restarts += 1
        self.overdue = self._prompts.expire(86_400.0)
        self.leased = self._prompts.lease(4, replica="replica-0#0", now_s=0.0)


def test_a_replica_is_not_overdue_while_the_trainer_restarts(tmp_path: Path) -> None:
    fleet = TrainerRestartsSlowly(tmp_path)
    train(tmp_path, fleet, Interrupts(), train={"steps": 2, "batch_groups": 2})
    assert (fleet.restarts, fleet.overdue, fleet.leased) == (1, [], [])
    assert sorted(trained_prompts(tmp_path)) == [0, 1, 2, 3]


class SkippingFleet(StandInFleet):
    """Two prompts have failed before the first batch."""

    def value_of(self, info: str) -> BatchInfo | None:
        failed = {3: "no judge", 5: "no unit"} if self._step == 0 else {}
        return BatchInfo([self._step + 1], {}, {}, UntrainedPrompts(failed=failed))


def test_skipped_prompts_are_logged_and_recorded(tmp_path: Path) -> None:
    told = train(tmp_path, SkippingFleet(tmp_path, DurableFS()), Interrupts())
    assert told.count("is skipped") == 1 and "prompt 3 failed and is skipped (no judge); 1 more failed as well" in told
    first, second = (json.loads(line) for line in (tmp_path / PROMPTS).read_text().splitlines())
    assert first["failed"] == {"3": "no judge", "5": "no unit"} and "failed" not in second


class StandInEvaluation:
    """An evaluation without replicas: it is over when it has a result, or is lost."""

    def __init__(self) -> None:
        self.is_over = False
        self.whole: Evaluation | None = None

    def poll(self) -> None:
        pass

    def result(self) -> Evaluation | None:
        return self.whole


class EvaluatingFleet(StandInFleet):
    """Evaluates weights of ``version``. ``events`` has the evaluations and waits, the saves, transfers and export."""

    def __init__(self, home: Path, *, version: int = 1) -> None:
        super().__init__(home, DurableFS())
        self.version = version
        self.events: list[str] = []
        self._evaluation = StandInEvaluation()

    def evaluate(self, *, alone: bool) -> StandInEvaluation:
        self.events.append("evaluate")
        assert self.events.count("evaluate") <= 4, "without an end"
        self._evaluation = StandInEvaluation()
        return self._evaluation

    def watch(self, answers: list[Any]) -> list[Any]:
        if not answers and self._evaluation is not None and not self._evaluation.is_over:
            self.events.append("wait")
            assert self.events.count("wait") <= 4, "without an end"
            self.answer(self._evaluation)
        return answers

    def answer(self, evaluation: StandInEvaluation) -> None:
        evaluation.whole = Evaluation(self.version, 0, [EvaluatedPrompt("", [{"reward": 0.5}])])
        evaluation.is_over = True

    def save(self, ledger: dict[str, Any]) -> dict[str, float]:
        self.events.append("save")
        return super().save(ledger)

    def publish_last_weights(self) -> None:
        self.events.append("publish")

    def export_model(self) -> None:
        self.events.append("export")


def train_with_evaluations(
    home: Path, fleet: EvaluatingFleet, interrupts: Interrupts, *, every_steps: int, sync_every: int = 1
) -> str:
    """Run two steps without a save between them. An evaluation begins after ``every_steps``, and one at the end."""
    settings = {"data": {"train": home, "eval": home}, "eval": {"every_steps": every_steps}}
    settings |= {"async_training": {"trigger_parameter_sync_step": sync_every}}
    return train(home, fleet, interrupts, checkpoint={"save_every_steps": 0}, **settings)


def test_the_last_checkpoint_is_saved_before_the_evaluations_that_a_run_waits_for(tmp_path: Path) -> None:
    fleet = EvaluatingFleet(tmp_path)
    train_with_evaluations(tmp_path, fleet, Interrupts(), every_steps=2)
    assert fleet.events == ["evaluate", "save", "wait", "evaluate", "wait", "export"]
    assert read_metrics(tmp_path)[-1]["eval/reward"] == 0.5


def test_the_last_weights_are_evaluated_once(tmp_path: Path) -> None:
    fleet = EvaluatingFleet(tmp_path, version=2)
    shown = train_with_evaluations(tmp_path, fleet, Interrupts(), every_steps=2)
    assert fleet.events == ["evaluate", "save", "wait", "export"], "the regular evaluation was of the last version"
    last = read_metrics(tmp_path)[-1]
    assert (last["step"], last["eval/version"]) == (2, 2) and "eval 0.500" in shown


def test_weights_without_a_version_are_sent_before_the_last_evaluation(tmp_path: Path) -> None:
    fleet = EvaluatingFleet(tmp_path, version=0)
    train_with_evaluations(tmp_path, fleet, Interrupts(), every_steps=2, sync_every=3)
    assert fleet.events == ["evaluate", "save", "wait", "publish", "evaluate", "wait", "export"]


class SignalInAnEvaluation(EvaluatingFleet):
    """A signal comes while the run waits for an evaluation, which does not end."""

    def __init__(self, home: Path, interrupts: Interrupts) -> None:
        super().__init__(home)
        self._interrupts = interrupts

    def answer(self, evaluation: StandInEvaluation) -> None:
        self._interrupts.pending = True


@pytest.mark.parametrize("every_steps", [0, 2])
def test_after_a_signal_a_run_does_not_wait_for_an_evaluation(tmp_path: Path, every_steps: int) -> None:
    interrupts = Interrupts()
    fleet = SignalInAnEvaluation(tmp_path, interrupts)
    train_with_evaluations(tmp_path, fleet, interrupts, every_steps=every_steps)
    assert sorted(fleet.events) == ["evaluate", "save", "wait"]
    assert (tmp_path / CHECKPOINT).read_text() == "2"


class SignalInTheExport(SignalInAnEvaluation):
    """A signal comes while the run writes the model: the run ends as if none had come."""

    def answer(self, evaluation: StandInEvaluation) -> None:
        EvaluatingFleet.answer(self, evaluation)

    def export_model(self) -> None:
        self._interrupts.pending = True


STATUS_TRACKER = """
from hwrl.interfaces import Tracker

class StatusFile(Tracker):
    def __init__(self, options):
        pass

    def start(self, run):
        self.path = run.directory / "status"

    def log(self, metrics, *, step):
        pass

    def finish(self, status):
        self.path.write_text(status)
"""


@pytest.mark.parametrize(
    ("fleet_class", "status"), [(SignalInTheExport, "finished"), (SignalInAnEvaluation, "interrupted")]
)
def test_a_signal_during_the_export_does_not_interrupt_a_run_for_trackers(
    tmp_path: Path, fleet_class: type[SignalInAnEvaluation], status: str
) -> None:
    (tmp_path / "status_tracker.py").write_text(STATUS_TRACKER)
    trackers = {"trackers": [f"{tmp_path}/status_tracker.py:StatusFile"]}
    interrupts = Interrupts()
    data = {"train": tmp_path, "eval": tmp_path}
    train(tmp_path, fleet_class(tmp_path, interrupts), interrupts, data=data, report=trackers)
    assert (tmp_path / "status").read_text() == status


SLOW_TRACKER = """
import threading
from hwrl.interfaces import Tracker

seen, step_two = [], threading.Event()

def trained():
    step_two.set()

def what_was_seen():
    return seen

class Slow(Tracker):
    def __init__(self, options):
        pass

    def start(self, run):
        seen.append(f"start after step {run.resume_step}")

    def log(self, metrics, *, step):
        pass

    def finish(self, status):
        seen.append(f"{status} {'during' if step_two.wait(200) else 'before'} step 2")
"""


class SlowTrackerSeesADeath(TrainerDiesInStepTwo):
    """The tracker's finish returns when the run has trained step 2, after the trainer's restart."""

    def step(self, groups: list[Any]) -> StepOutcome:
        outcome = super().step(groups)
        if self._step == 2:
            load_function(f"{self._home}/slow.py:trained", key="a test")()
        return outcome


def test_a_slow_tracker_does_not_delay_the_trainers_recovery(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW_TRACKER)
    target = f"{tmp_path}/slow.py:Slow"
    logged = train(tmp_path, SlowTrackerSeesADeath(tmp_path, DurableFS()), Interrupts(), report={"trackers": [target]})
    seen = load_function(f"{tmp_path}/slow.py:what_was_seen", key="a test")()
    assert seen == ["start after step 0", "interrupted during step 2", "start after step 1", "finished during step 2"]
    assert "the tracker" not in logged


class EvaluationsAreLost(EvaluatingFleet):
    """Each evaluation is lost with its replica."""

    def answer(self, evaluation: StandInEvaluation) -> None:
        evaluation.is_over = True


def test_a_run_gives_up_the_last_evaluation_after_three_losses(tmp_path: Path) -> None:
    fleet = EvaluationsAreLost(tmp_path)
    logged = train_with_evaluations(tmp_path, fleet, Interrupts(), every_steps=0)
    assert fleet.events == ["save", *["evaluate", "wait"] * 3, "export"]
    assert "the evaluation of the last weights failed 3 times" in logged
