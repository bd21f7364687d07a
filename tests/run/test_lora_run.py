"""``hwrl train`` with an adapter: its transfers and checkpoints, with dead and sleeping replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import LORA, Run, adapter_nbytes, assert_whole, base_nbytes, sent

pytestmark = [pytest.mark.long(30), pytest.mark.timeout(600)]  # up to three runs, on a busy machine

TIMEOUT_S = 240.0


def sleepy_reward(demo: Path) -> str:
    """Return a slow reward function: batches, and with them new prompts, come late, and replicas fall asleep."""
    module = demo / "sleepy.py"
    module.write_text(
        "import time\n"
        "from hwrl.run.demo import sort_reward\n\n"
        "def score(prompt, response, answer):\n"
        "    time.sleep(0.05)\n"
        "    return sort_reward(prompt, response, answer)\n"
    )
    return f"reward.function={module}:score"


@pytest.mark.parametrize(
    ("bypass_cpu", "ranks"), [("true", 2), ("false", 1), pytest.param("false", 2, marks=pytest.mark.extended)]
)
def test_the_base_travels_once_and_each_version_is_an_adapter(
    start: Callable[..., Run], demo: Path, bypass_cpu: str, ranks: int
) -> None:
    run = start(*LORA, f"weights.bypass_cpu={bypass_cpu}", f"train.ranks={ranks}", f"rollout.replicas={ranks}")
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    assert_whole(run)
    assert sum(sent(run, "base_sent")) == 1
    assert sum(sent(run, "base_nbytes")) == base_nbytes(demo)
    assert sent(run, "adapter_nbytes")[1:] == [adapter_nbytes(run)] * 23
    assert [line["sync/nbytes"] for line in run.metrics()] == [adapter_nbytes(run)] * 24
    assert "1 times the base" in run.output()


@pytest.mark.parametrize("bypass_cpu", ["true", "false"])
def test_what_a_sleeper_has_dropped_is_sent_again(start: Callable[..., Run], demo: Path, bypass_cpu: str) -> None:
    sleep = ("rollout.free_cache_engine=true", "rollout.sleep_level=2", "async_training.staleness_threshold=0")
    run = start(*LORA, *sleep, sleepy_reward(demo), f"weights.bypass_cpu={bypass_cpu}", "train.steps=6")
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    totals = {name: sum(line[f"rollout/{name}"] for line in run.metrics()) for name in ("sleeps", "base_loads")}
    assert totals["sleeps"] >= 1
    assert totals["base_loads"] >= 2
    assert all(line["rollout/freed_nbytes"] >= base_nbytes(demo) * line["rollout/sleeps"] for line in run.metrics())
    times_sent = sum(sent(run, "base_sent"))
    assert times_sent >= 2 if bypass_cpu == "true" else times_sent == 1, "the host's store has it"
    assert sum(sent(run, "base_nbytes")) == times_sent * base_nbytes(demo)


def test_a_sleeper_keeps_whole_models_or_gets_them_again(start: Callable[..., Run], demo: Path) -> None:
    sleep = ("rollout.free_cache_engine=true", "rollout.sleep_level=2", "async_training.staleness_threshold=0")
    run = start(*sleep, sleepy_reward(demo), "train.steps=6")
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    assert sum(line["rollout/sleeps"] for line in run.metrics()) >= 1
    assert "sync/base_sent" not in run.metrics()[-1]


def test_a_dead_replica_gets_the_base_again_and_a_dead_run_goes_on_with_its_adapter(
    start: Callable[..., Run],
) -> None:
    run = start(*LORA, "train.steps=1000")
    run.wait_for_step(6, timeout_s=TIMEOUT_S)
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.wait_for_output("a new replica starts", timeout_s=TIMEOUT_S)
    before = run.metrics()[-1]["step"]
    run.wait_for_step(int(before) + 8, timeout_s=TIMEOUT_S)
    assert sum(sent(run, "base_sent")) == 2
    run.kill()
    run.process.wait(10)
    steps = int(run.metrics()[-1]["step"]) + 5
    again = start(*LORA, f"train.steps={steps}", "resume=true")
    assert again.wait(timeout_s=TIMEOUT_S) == 0, again.output()
    assert [line["step"] for line in again.metrics()] == list(range(1, steps + 1))
