"""``hwrl train`` with an adapter: its transfers, also to sleeping replicas."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.train_run import (
    LORA,
    TWO,
    Run,
    adapter_nbytes,
    assert_adapters_travel,
    assert_whole,
    base_nbytes,
    sent,
)

pytestmark = pytest.mark.long(30)

TIMEOUT_S = 2400.0


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


@pytest.mark.extended  # test_seen_run.py: two ranks and two replicas, by the device transport
@pytest.mark.parametrize("words", [("weights.bypass_cpu=false", *more) for more in ((), TWO)])
def test_by_the_host_the_base_travels_once_and_each_version_is_an_adapter(
    start: Callable[..., Run], demo: Path, words: tuple[str, ...]
) -> None:
    run = start(*LORA, *words)
    assert run.wait(timeout_s=TIMEOUT_S) == 0, run.output()
    assert_whole(run)
    assert_adapters_travel(run, run.metrics(), base_nbytes(demo))
    assert "the base 1 times" in run.output()


@pytest.mark.extended  # test_sync_plan.py: what a sleeper drops is sent again
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
    assert sum(sent(run, "base_nbytes")) == times_sent * base_nbytes(demo)
    if bypass_cpu == "true":
        assert times_sent >= 2
    else:  # the host's store has it
        assert times_sent == 1
        assert [line["sync/nbytes"] for line in run.metrics()] == [adapter_nbytes(run)] * 6
