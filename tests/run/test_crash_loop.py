"""A replica that joins the link of weights, and dies before it takes any, again and again, in a real run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.plugin_files import install_plugin
from tests.support.speed import slow
from tests.support.train_run import Run, assert_whole

CRASHING_ENGINE = """
import os
import time
from pathlib import Path

import hwrl
from hwrl.rollout import EmbeddedEngine

MARKER = Path({marker!r})


class CrashingEngine(EmbeddedEngine):
    # The first process lives, and is slow. Each other one dies when it is offered its first weights.
    def check_weights(self, tensors):
        try:
            MARKER.touch(exist_ok=False)
        except FileExistsError:
            if MARKER.read_text() != str(os.getpid()):
                os._exit(7)
        MARKER.write_text(str(os.getpid()))
        super().check_weights(tensors)

    def step(self):
        time.sleep(0.25 if self.pending() else 0.0)
        return super().step()


@hwrl.hookimpl
def hwrl_rollout_engine(settings, options, backend):
    return CrashingEngine.from_settings(settings, backend=backend)
"""


@pytest.mark.extended
@pytest.mark.long(60)
def test_a_crash_loop_costs_little_and_is_given_up_while_the_rest_goes_on(
    start: Callable[..., Run], demo: Path
) -> None:
    install_plugin(demo, "crashing", source=CRASHING_ENGINE.format(marker=str(demo / "lives")))
    run = start(
        "rollout.engine=crashing",
        "rollout.replicas=2",
        "rollout.min_replicas=1",
        "rollout.max_restarts=2",
        "eval.every_steps=0",
        PYTHONPATH=str(demo),
    )
    assert run.wait() == 0, run.output()
    assert_whole(run)
    told = run.output()
    loop = re.findall(r"rollout (replica-\d) ended .*; a new replica starts(.*)", told)
    assert [pause for _, pause in loop] == ["", " in 1 s"] and len({name for name, _ in loop}) == 1, told
    assert "it died 3 times in a row and is given up; 1 replicas are left" in told
    slowest_s = max(line["timing_s/sync"] for line in run.metrics())
    assert slowest_s < slow(15.0), "weights.timeout_s is 60: no version waited for a dead receiver until then"
