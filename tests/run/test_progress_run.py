"""Progress, not age, is the heartbeat of a replica: a slow one lives, and a hung one is replaced. Inputs stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.plugin_files import install_plugin
from tests.support.speed import slow
from tests.support.train_run import Run, change_an_input, trained_prompts

LIMIT_S = slow(4)
SLOW_ENGINE = """
import time
from pathlib import Path

import hwrl
from hwrl.rollout import EmbeddedEngine


class SlowEngine(EmbeddedEngine):
    def step(self):
        if self.pending():
            time.sleep({step_s})
            try:
                Path({marker!r}).touch(exist_ok=False)
            except FileExistsError:
                return super().step()
            time.sleep(1e6)
        return super().step()


@hwrl.hookimpl
def hwrl_rollout_engine(settings, options, backend):
    return SlowEngine.from_settings(settings, backend=backend)
"""
SLOW_REWARD = """
import time
from pathlib import Path


def reward(prompt, response, answer):
    try:
        Path({marker!r}).touch(exist_ok=False)
        time.sleep({seconds})
    except FileExistsError:
        pass
    return len(response) % 2
"""


@pytest.mark.long(110)
def test_slow_work_keeps_its_replica_a_hung_engine_loses_it_and_a_changed_input_ends_the_run(
    start: Callable[..., Run], demo: Path
) -> None:
    """A response and a reward take longer than the limit without progress. Then an input changes."""
    install_plugin(demo, "slow", source=SLOW_ENGINE.format(marker=str(demo / "hung"), step_s=LIMIT_S / 11))
    (demo / "slow_reward.py").write_text(SLOW_REWARD.format(marker=str(demo / "judged"), seconds=LIMIT_S + 2))
    run = start(
        "rollout.engine=slow",
        "rollout.max_new_tokens=16",
        f"rollout.group_timeout_s={LIMIT_S:g}",
        f"reward.function={demo / 'slow_reward.py'}:reward",
        "train.steps=2000",
        "train.batch_groups=2",
        "checkpoint.save_every_steps=0",
        "eval.every_steps=0",
        "data.eval=null",
        PYTHONPATH=str(demo),
    )
    run.wait_for_step(1)
    told = f"rollout replica-0 ended (it made no progress on a prompt for rollout.group_timeout_s={LIMIT_S:g} s)"
    assert told in run.output() and run.output().count("a new replica starts") == 1, run.output()
    assert (demo / "judged").exists()
    assert run.metrics()[0]["ledger/expired"] >= 1
    change_an_input(run, demo, replaced=1)
    numbers = trained_prompts(run)
    assert len(numbers) == 2 * len(run.metrics()) == len(set(numbers)), "a prompt was trained on twice"
