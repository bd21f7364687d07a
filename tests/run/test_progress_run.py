"""Progress, not age, is the heartbeat of a replica: a slow one lives, and a hung one is replaced."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.plugin_files import install_plugin
from tests.support.speed import slow
from tests.support.train_run import Run, trained_prompts

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


@pytest.mark.long(40)
def test_a_long_response_and_a_long_reward_keep_their_replica_and_an_engine_that_hangs_loses_it(
    start: Callable[..., Run], demo: Path
) -> None:
    install_plugin(demo, "slow", source=SLOW_ENGINE.format(marker=str(demo / "hung"), step_s=LIMIT_S / 11))
    (demo / "slow_reward.py").write_text(SLOW_REWARD.format(marker=str(demo / "judged"), seconds=LIMIT_S + 2))
    run = start(
        "rollout.engine=slow",
        "rollout.max_new_tokens=16",
        f"rollout.group_timeout_s={LIMIT_S:g}",
        f"reward.function={demo / 'slow_reward.py'}:reward",
        "train.steps=1",
        "train.batch_groups=2",
        "eval.every_steps=0",
        "data.eval=null",
        PYTHONPATH=str(demo),
    )
    assert run.wait() == 0, run.output()
    told = f"rollout replica-0 ended (it made no progress on a prompt for rollout.group_timeout_s={LIMIT_S:g} s)"
    assert told in run.output() and run.output().count("a new replica starts") == 1, run.output()
    assert (demo / "judged").exists()
    assert sorted(trained_prompts(run)) == [0, 1]
    assert run.metrics()[-1]["ledger/expired"] >= 1
