"""``hwrl train`` while its files change: outputs first, then inputs."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import Run, change_an_input, saved_steps, trained_prompts

pytestmark = pytest.mark.long(70)


@pytest.mark.extended  # test_progress_run.py changes an input; others in tests/run check each refusal and message
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
    missing = ", ".join(map(str, range(1, last + 1)))
    assert f"trained_prompts.jsonl is incomplete: steps {missing} of {last} missing" in again.output()
    assert "reward.function has changed since the checkpoint was saved" in again.output()
    change_an_input(again, demo)  # and none while it runs
    assert sorted(trained_prompts(again)) == list(range(4 * last, 4 * max(saved_steps(run))))
