"""``hwrl train`` while its files change: outputs first, then inputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import Run, trained_prompts

pytestmark = pytest.mark.long(70)


def saved_steps(run: Run) -> list[int]:
    return [int(path.name.rpartition("_")[2]) for path in (run.directory / "checkpoints").glob("global_step_*")]


def change_an_input(run: Run, demo: Path) -> None:
    """Change the prompts while the run replaces a process, and check that it ends."""
    rows = (demo / "train.jsonl").read_text().splitlines()
    (demo / "train.jsonl").write_text("\n".join(reversed(rows)))
    assert run.kill("ray::RolloutActor") == 1
    assert run.wait() == 1, run.output()
    told = run.output().partition("InputChangedError: ")[2]
    assert told.startswith(f"{demo / 'train.jsonl'} changed during the run"), run.output()
    assert run.output().count("a new replica starts") == 1, "another one would be refused as well"
    assert [line["step"] for line in run.metrics()] == list(range(1, max(saved_steps(run)) + 1))


def test_an_input_that_changes_ends_the_run_with_a_checkpoint(start: Callable[..., Run], demo: Path) -> None:
    run = start("train.steps=2000", "checkpoint.save_every_steps=0", "eval.every_steps=0")
    run.wait_for_step(2)
    change_an_input(run, demo)


@pytest.mark.extended  # report/test_run_report.py, test_identity.py and test_resume.py check each refusal and message
def test_a_run_whose_files_are_changed_ends_with_a_checkpoint_and_goes_on_from_it(
    start: Callable[..., Run], demo: Path
) -> None:
    words = ["train.steps=2000", "checkpoint.save_every_steps=0", "eval.every_steps=0"]
    (demo / "rewards.py").write_text("from hwrl.run.demo import sort_reward\n")
    words.append(f"reward.function={demo / 'rewards.py'}:sort_reward")

    run = start(*words)  # what it writes is deleted
    run.wait_for_step(2)
    shutil.rmtree(run.directory / "tensorboard")
    run.wait_for_output("the tracker tensorboard failed")
    step = int(run.metrics()[-1]["step"])
    run.wait_for_step(step + 2)
    (run.directory / "trained_prompts.jsonl").unlink()
    assert run.wait() == 1, run.output()
    last = int(run.metrics()[-1]["step"])
    told = run.output().partition("RunDirectoryError: ")[2]
    assert told.startswith(f"{run.directory / 'trained_prompts.jsonl'} cannot be written"), run.output()
    assert f"then step {last} was saved in" in told
    assert "Traceback" not in run.output() and run.output().count("the tracker") == 1
    assert saved_steps(run) == [last]

    with (demo / "rewards.py").open("a") as file:  # of what it reads, one file may change between two runs
        file.write("# the same\n")
    again = start("resume=true", *words)
    again.wait_for_step(last + 2)
    assert (
        f"{run.directory / 'trained_prompts.jsonl'} is incomplete: steps 1-{last} of {last} missing" in again.output()
    )
    assert "reward.function has changed since the checkpoint was saved" in again.output()
    change_an_input(again, demo)  # and none while it runs
    assert sorted(trained_prompts(again)) == list(range(4 * last, 4 * max(saved_steps(run))))
