"""``train.profile_steps``: a trace of real training steps, and a run that goes on without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.run.trainer import StepProfile
from hwrl.train import Algorithm, AsyncTrainer, PolicyLoss
from tests.support.fsdp_training import engine_on, groups_of
from tests.support.fsdp_training import model_directory as model_directory


def train(model_directory: Path, profile: StepProfile, steps: range) -> None:
    """Train ``steps`` and end, as in a run."""
    trainer = AsyncTrainer(
        engine_on(model_directory, None), algorithm=Algorithm(PolicyLoss()), max_staleness=len(steps)
    )
    for step in steps:
        with profile.recording(step):
            trainer.step(groups_of(2, seed=step))
    profile.finish()


@pytest.mark.parametrize(("steps", "recorded"), [(range(3, 5), "3-4"), (range(1, 4), "2-3")])
def test_a_run_that_resumes_or_ends_inside_the_range_records_the_rest(
    model_directory: Path, tmp_path: Path, steps: range, recorded: str
) -> None:
    profile = StepProfile(2, 4, directory=tmp_path)
    train(model_directory, profile, steps)
    assert [path.name for path in tmp_path.iterdir()] == [f"steps_{recorded}.json.gz"]


def test_a_profile_that_cannot_be_written_is_reported_and_ends_nothing(
    model_directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "profile").write_text("a file is in the way")
    profile = StepProfile(1, 1, directory=tmp_path / "profile")
    train(model_directory, profile, range(1, 3))
    (said,) = (record.getMessage() for record in caplog.records if "profiler" in record.getMessage())
    assert said.startswith("the profiler failed (FileExistsError") and said.endswith("there is no profile")
