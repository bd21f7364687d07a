"""TRL's GRPOTrainer learns, is killed with SIGKILL, and resumes equal to an undisturbed run."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hwrl_trl import OffloadCallback
from hwrl_trl.demo import tiny_trainer
from tests.support.trainer_checkpoints import assert_equal, trained

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL is not installed: ci/stack trl")


def make_demo(directory: Path) -> Any:
    """Ten steps are an epoch, in TRL's order."""
    return tiny_trainer(directory, callbacks=[OffloadCallback()], max_steps=13, save_steps=2)


def make_with_reused_responses(directory: Path) -> Any:
    """Four steps use the same responses."""
    return tiny_trainer(directory, max_steps=13, save_steps=2, steps_per_generation=2, num_iterations=2)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return trained(make_demo, tmp_path_factory.mktemp("undisturbed"))[1]


def test_it_learns(undisturbed: Any) -> None:
    rewards = [entry["reward"] for entry in undisturbed["log"]]
    assert len(rewards) == 13 and rewards[0] < 0.1 and rewards[-1] > 0.3


def test_killed_in_and_between_epochs_it_resumes_equal(undisturbed: Any, tmp_path: Path) -> None:
    began, content = trained(make_demo, tmp_path, kill_at=(5, 10, 12), max_ckpt_to_keep=2, async_save=True)
    assert began in (10, 12)
    assert_equal(content, undisturbed)


def test_responses_in_use_are_used_up_before_a_save(tmp_path: Path) -> None:
    _, undisturbed = trained(make_with_reused_responses, tmp_path / "undisturbed")
    began, content = trained(make_with_reused_responses, tmp_path / "killed", kill_at=(7, 9))
    assert began == 8, "transformers would have saved after steps 4, 6 and 8"
    assert_equal(content, undisturbed)
