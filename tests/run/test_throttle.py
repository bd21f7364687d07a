"""The throttle of ``async_training.adaptive``, on figures, in a simulated run and in a real one."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

from hwrl.run import Metrics, load_config
from hwrl.run.simulate import SimulatedRun, Workload, as_measured, simulate
from hwrl.run.throttle import Throttle, ThrottleState
from tests.support.train_run import Run, assert_whole


def line(*, wait: float, busy: float) -> Metrics:
    """Return a step of 10 s; ``busy`` is the sum over the replicas, in replicas."""
    waited = {"perf/batch_wait_s": 10 * wait, "rollout/generate_s": 9 * busy, "rollout/update_s": busy}
    return {"perf/step_s": 10.0, **waited}


def decide(throttle: Throttle, *, wait: float, busy: float, replicas: int = 4) -> ThrottleState:
    """Return the state after 8 steps like this."""
    for _ in range(8):
        throttle.observe(line(wait=wait, busy=busy), replicas=replicas)
    return throttle.state


def test_it_decides_after_eight_measured_steps() -> None:
    throttle = Throttle(max_lead=16, groups_per_version=8, sleeps=False)
    seen = [throttle.observe(line(wait=0.0, busy=0.1), replicas=1) for _ in range(7)]
    assert not throttle.observe({"step": 1.0}, replicas=1), "a step after a restart has no time"
    assert seen == [False] * 7 and throttle.observe(line(wait=0.0, busy=0.1), replicas=1)


def test_the_lead_moves_within_the_bound_and_rests_between() -> None:
    throttle = Throttle(max_lead=16, groups_per_version=8, sleeps=False)
    assert decide(throttle, wait=0.5, busy=3.9).lead_groups == 16, "the bound"
    assert [decide(throttle, wait=0.01, busy=2.0).lead_groups for _ in range(3)] == [15, 14, 13]
    assert decide(throttle, wait=0.01, busy=3.5).lead_groups == 13, "the replicas have no room"
    assert decide(throttle, wait=0.04, busy=2.0).lead_groups == 13, "the dead band"
    assert decide(throttle, wait=0.10, busy=2.0).lead_groups == 16
    for _ in range(40):
        decide(throttle, wait=0.0, busy=0.1)
    assert throttle.state == ThrottleState(0, 0)


def test_idle_replicas_fall_asleep_while_the_others_have_room_and_wake_when_they_have_none() -> None:
    throttle = Throttle(max_lead=8, groups_per_version=8, sleeps=True)
    assert [decide(throttle, wait=0.0, busy=1.5).asleep for _ in range(3)] == [1, 2, 2], "1.5 of 2 is below 80 %"
    assert throttle.state.lead_groups == 7, "after the sleepers, the lead"
    assert decide(throttle, wait=0.2, busy=1.5) == ThrottleState(8, 2), "the lead was too small"
    assert decide(throttle, wait=0.2, busy=1.9) == ThrottleState(8, 1)
    assert decide(throttle, wait=0.2, busy=2.0) == ThrottleState(8, 0), "the lead is at its bound"


def test_it_wakes_a_replica_soon_after_replicas_have_left() -> None:
    throttle = Throttle(max_lead=8, groups_per_version=8, sleeps=True)
    for _ in range(5):
        decide(throttle, wait=0.0, busy=0.5, replicas=8)
    assert throttle.state.asleep == 5
    assert decide(throttle, wait=0.2, busy=0.95, replicas=4).asleep == 2, "one of 4 was awake, so 3 were asleep"
    assert decide(throttle, wait=0.03, busy=0.5, replicas=1).asleep == 0


def simulated(
    directory: Path,
    *,
    train_token_s: float,
    adaptive: bool = False,
    staleness: int = 4,
    lead: float | None = None,
    sigma: float = 1.0,
) -> SimulatedRun:
    (directory / "config.yaml").write_text(
        f"dir: {directory}/run\nmodel: {{path: {directory}/model}}\ndata: {{train: {directory}/t.jsonl}}\n"
        'reward: {function: "m:f"}\n'
        "rollout: {replicas: 3, n: 4, max_new_tokens: 1024, max_running: 16}\ntrain: {ranks: 1, batch_groups: 8}\n"
        f"async_training: {{staleness_threshold: {staleness}, adaptive: {str(adaptive).lower()}}}\n"
    )
    overrides = [] if lead is None else [f"async_training.lead_versions={lead:g}"]
    costs = {"full_step_s": 0.04, "train_token_s": train_token_s, "sync_fixed_s": 0.5, "update_s": 0.2}
    work = Workload(mean_tokens=200.0, sigma=sigma, **costs)
    return simulate(as_measured(load_config(directory / "config.yaml", overrides), 300), work)


def mean_age(run: SimulatedRun) -> float:
    return statistics.mean(line["staleness/mean"] for line in run.lines[200:])


def test_behind_a_slow_trainer_the_tokens_become_young_for_hardly_more_time(tmp_path: Path) -> None:
    fixed, moved = (simulated(tmp_path, adaptive=adaptive, train_token_s=8e-3) for adaptive in (False, True))
    assert mean_age(fixed) > 3.9 and mean_age(moved) < 1.5
    assert moved.seconds < 1.03 * fixed.seconds
    leads = [line["throttle/lead_versions"] for line in moved.lines]
    assert leads[0] == 4.0 and 0.5 < leads[-1] < 2.0


def test_with_long_tails_a_smaller_lead_keeps_tokens_young_and_waits_less_than_a_smaller_bound(tmp_path: Path) -> None:
    bound, lead = (
        simulated(tmp_path, train_token_s=1e-3, sigma=1.3, staleness=staleness, lead=2.0) for staleness in (2, 4)
    )
    assert mean_age(bound) == pytest.approx(mean_age(lead), abs=0.1) == 2.0
    assert lead.seconds < 0.9 * bound.seconds
    assert max(line["staleness/max"] for line in lead.lines) == 4, "long responses use the threshold"


def test_the_adaptive_lead_begins_at_its_limit(tmp_path: Path) -> None:
    limited = simulated(tmp_path, adaptive=True, train_token_s=8e-3, lead=1.5)
    leads = [line["throttle/lead_versions"] for line in limited.lines]
    assert leads[0] == max(leads) == 1.5


def test_before_a_fast_trainer_nothing_moves(tmp_path: Path) -> None:
    fixed, moved = (simulated(tmp_path, adaptive=adaptive, train_token_s=5e-4) for adaptive in (False, True))
    assert moved.seconds == fixed.seconds and mean_age(moved) == mean_age(fixed)


@pytest.mark.extended
@pytest.mark.long(60)
def test_in_a_real_run_the_lead_shrinks_replicas_sleep_and_every_prompt_is_trained_once(
    start: Callable[..., Run],
) -> None:
    run = start(
        "async_training.adaptive=true",
        "async_training.staleness_threshold=4",
        "algorithm.ppo_epochs=40",  # so long that a busy machine does not make the trainer wait
        "rollout.replicas=2",
        "rollout.free_cache_engine=true",
        "eval.every_steps=0",
    )
    assert run.wait() == 0, run.output()
    assert_whole(run)
    lines = run.metrics()
    states = [(line["throttle/lead_versions"], line["throttle/asleep"]) for line in lines]
    assert states[0] == (4.0, 0) and states[-1] != states[0], states
    assert max(line["staleness/max"] for line in lines) <= 4
    assert "balance: the trainer waits" in run.output() and "versions on average" in run.output()
