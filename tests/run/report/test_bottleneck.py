"""Which side of a run is the bottleneck, in the metrics and in the summary."""

from __future__ import annotations

from pathlib import Path

import pytest

from hwrl.run.cluster.placement import DeviceCounts, assign_devices
from hwrl.run.ledger import BatchInfo
from hwrl.run.report import Metrics
from hwrl.run.report.bottleneck import busy_shares
from hwrl.run.report.steps import StepRates
from hwrl.run.report.summary import summarise
from tests.support.run_config import config_of


def line(*, wall_s: float, train_s: float, generate_s: float, replicas: int = 2) -> Metrics:
    """Return the metrics of a step; ``generate_s`` is the sum over the replicas."""
    return {
        "step": 1.0,
        "time_s": wall_s,
        "perf/step_s": wall_s,
        "timing_s/wait": wall_s - train_s,
        "timing_s/train": train_s - 0.5,
        "timing_s/sync": 0.5,
        "rollout/generate_s": generate_s,
        "rollout/replicas": float(replicas),
    }


@pytest.mark.parametrize(
    ("train_s", "generate_s", "code", "sentence"),
    [
        (4.0, 19.0, 1.0, "rollout, busy 95% of the time; trainer 40%"),
        (9.0, 10.0, 0.0, "trainer, busy 90% of the time; rollout 50%"),
        (9.0, 18.5, 0.5, "none, trainer and rollout are equally busy (90% and 92% of the time)"),
    ],
)
def test_the_busier_side_is_the_bottleneck(train_s: float, generate_s: float, code: float, sentence: str) -> None:
    shares = busy_shares([line(wall_s=10.0, train_s=train_s, generate_s=generate_s)] * 3)
    assert shares is not None
    assert (shares.code, str(shares)) == (code, sentence)
    assert shares.wall_ratio == pytest.approx(10 / max(train_s, generate_s / 2))


def test_shares_are_of_the_whole_time_of_the_lines_and_lines_without_it_do_not_count() -> None:
    lines = [line(wall_s=1.0, train_s=1.0, generate_s=0.0), line(wall_s=9.0, train_s=1.0, generate_s=9.0)]
    shares = busy_shares([{"step": 1.0, "timing_s/train": 50.0}, *lines])
    assert shares is not None
    assert (shares.trainer, shares.rollout) == pytest.approx((0.2, 0.45))
    assert busy_shares([]) is busy_shares([{"step": 1.0}]) is None


def test_each_line_has_the_speed_of_a_device_and_the_bottleneck_of_the_last_steps() -> None:
    now_s, seconds = 0.0, 0.0
    rates = StepRates([], now=lambda: now_s)
    trained = {"response/tokens": 300.0, "timing_s/wait": 8.0, "timing_s/train": 2.0}
    for step in range(1, 4):
        now_s, seconds = step * 10.0, step * 9.0
        replicas = {name: {"tokens": step * 400.0, "idle_s": step, "generate_s": seconds} for name in ("a", "b")}
        metrics = rates.metrics(trained, BatchInfo([], {}, replicas), devices=DeviceCounts(4, 5))
    assert metrics["perf/step_s"] == 10.0
    assert metrics["perf/tokens_per_s_per_device"] == pytest.approx(300 / 10 / 5)
    assert metrics["perf/rollout_tokens_per_s_per_device"] == pytest.approx(800 / 9 / 4)
    assert metrics["perf/bottleneck"] == 1.0
    quiet = rates.metrics(trained, BatchInfo([], {}, replicas), devices=DeviceCounts(4, 5))
    assert "perf/rollout_tokens_per_s_per_device" not in quiet, "no replica has reported since"


def test_undone_steps_and_a_recovery_count_neither_for_the_bottleneck_nor_for_a_step() -> None:
    now_s = 0.0
    rates = StepRates([], now=lambda: now_s)

    def step(at_s: float, *, generate_s: float, train_s: float) -> Metrics:
        nonlocal now_s
        now_s = at_s
        trained = {"response/tokens": 300.0, "timing_s/wait": 10.0 - train_s, "timing_s/train": train_s}
        batch = BatchInfo([], {}, {"a": {"idle_s": at_s - generate_s, "generate_s": generate_s}})
        return rates.metrics(trained, batch, devices=DeviceCounts(1, 2))

    assert step(10.0, generate_s=9.0, train_s=1.0)["perf/bottleneck"] == 1.0
    rates.go_back([])
    first, second = step(100.0, generate_s=95.0, train_s=9.0), step(110.0, generate_s=96.0, train_s=9.0)
    assert not {"perf/step_s", "perf/bottleneck", "perf/tokens_per_s_per_device"} & first.keys()
    assert (second["perf/step_s"], second["perf/bottleneck"]) == (10.0, 0.0)


def test_the_summary_says_how_fast_each_side_is_and_which_one_limits(tmp_path: Path) -> None:
    speed = {"perf/train_tokens_per_s_per_device": 45415.0, "perf/mfu": 0.49, "perf/tokens_per_s_per_device": 4000.0}
    history = [{**line(wall_s=10.0, train_s=4.0, generate_s=19.0), **speed}]
    text = summarise(config_of(tmp_path), history, interrupted=False).text
    assert (
        "bottleneck: rollout, busy 95% of the time; trainer 40%; wall time is 1.05 × the busy time of the busier side"
        in text
    )
    assert "perf/train_tokens_per_s_per_device 45,415, median of all steps" in text
    assert "perf/mfu 0.49" in text
    assert "rollout_tokens_per_s" not in text


def test_devices_that_both_sides_use_count_once_for_the_run() -> None:
    def counts(devices: int) -> DeviceCounts:
        assigned = assign_devices(devices=devices, ranks=2, replicas=3, tensor_parallel=1, may_share=True)
        return DeviceCounts.of(assigned.ranks, assigned.replicas)

    assert counts(8) == DeviceCounts(3, 5)
    assert counts(4) == DeviceCounts(2, 4)
    assert counts(2) == DeviceCounts(2, 2)
