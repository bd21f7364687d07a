"""The comparison of asynchronous and synchronous training, on made-up histories."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from hwrl.cli import main
from hwrl.errors import ConfigError
from hwrl.run import Config, PlainView, Summary
from hwrl_bench.async_training import COMMON, SMOOTHED_STEPS, compare, configure, overrides_of, table
from hwrl_bench.training_runs import History


def history_of(rewards: list[float], *, step_s: float, eval_reward: float | None = None) -> History:
    lines: History = [
        {
            "step": step,
            "time_s": step * step_s,
            "reward/mean": reward,
            "response/tokens_total": step * 100.0,
            "staleness/mean": 1.0,
            "trainer/idle_ratio": 0.25,
            "rollout/idle_ratio": 0.5,
            "response/length_mean": 5.0,
            "response/length_max": 25.0,
        }
        for step, reward in enumerate(rewards, start=1)
    ]
    return [*lines[:-1], lines[-1] | ({} if eval_reward is None else {"eval/reward": eval_reward})]


LEARNT = [0.0] * 20 + [1.0] * 20


def test_the_ratios_are_above_one_where_async_is_better() -> None:
    result = compare(
        {
            "async": [history_of(LEARNT, step_s=1.0, eval_reward=0.5)],
            "sync": [history_of(LEARNT, step_s=2.0, eval_reward=0.25)],
        }
    )
    assert result["ratios"] == {"tokens_per_s": 2.0, "time_to_reward": 2.0, "total_time": 2.0, "final_reward": 1.0}
    fast = result["kinds"]["async"]
    assert (fast["total_s"], fast["tokens_per_s"], fast["trainer_idle"], fast["rollout_idle"]) == (40, 100, 0.25, 0.5)
    assert fast["time_to_reward_s"] == 20 + 0.9 * SMOOTHED_STEPS, "the mean of the last steps reached 0.9"


def test_target_and_final_reward_are_the_smoothed_training_reward() -> None:
    spiked = [*[0.5] * 39, 1.5]
    result = compare(
        {
            "async": [history_of(spiked, step_s=1.0, eval_reward=9.0)],
            "sync": [history_of(spiked, step_s=1.0, eval_reward=8.0)],
        }
    )
    assert result["kinds"]["async"]["final_reward"] == pytest.approx(0.6)
    assert result["target_reward"] == pytest.approx(0.54)
    assert (result["kinds"]["async"]["eval_reward"], result["kinds"]["sync"]["eval_reward"]) == (9.0, 8.0)


def test_a_target_that_one_round_never_reached_is_null_and_not_the_total_time() -> None:
    never = history_of([0.0] * 40, step_s=1.0)
    rounds = [history_of(LEARNT, step_s=1.0), history_of(LEARNT, step_s=1.0), never]
    result = compare({"async": rounds, "sync": [history_of(LEARNT, step_s=2.0)] * 3})
    assert result["rounds"]["async"][2]["time_to_reward_s"] is None
    assert result["kinds"]["async"]["time_to_reward_s"] is None and result["ratios"]["time_to_reward"] is None
    assert json.loads(json.dumps(result))["ratios"]["time_to_reward"] is None
    assert "async / sync, time_to_reward: not reached" in table(result)


def test_a_missing_evaluation_and_a_short_run_are_no_errors() -> None:
    result = compare({"async": [history_of([0.5], step_s=1.0)], "sync": [history_of([0.5], step_s=1.0)]})
    assert result["kinds"]["sync"]["eval_reward"] is None and result["kinds"]["sync"]["time_to_reward_s"] == 1.0
    assert "not measured" in table(result)


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    configure(parser)
    return parser.parse_args(words)


def test_both_runs_have_the_same_settings_but_for_the_staleness() -> None:
    overrides = overrides_of(options_of("--steps", "7", "rollout.max_running=16", "rollout.n=8"))
    common = ["train.steps=7", *COMMON, "rollout.max_running=16", "rollout.n=8"]
    assert overrides["sync"] == [*common, "async_training.staleness_threshold=0"]
    assert overrides["async"] == [*common, "async_training.staleness_threshold=8", "async_training.lead_versions=4"]
    assert "async_training.lead_versions=1.5" in overrides_of(options_of("--staleness", "3"))["async"]
    assert "async_training.lead_versions=2" in overrides_of(options_of("--lead", "2"))["async"]


def test_a_staleness_for_both_runs_is_refused() -> None:
    with pytest.raises(ConfigError, match="the synchronous run has a staleness_threshold of 0"):
        overrides_of(options_of("async_training.lead_versions=2"))


def test_an_interrupted_run_ends_the_benchmark_without_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def interrupted(config: Config, view: PlainView) -> Summary:
        started.append(f"{config.dir.name} of {config.rollout.n}")
        return Summary(finished=False, missed_goals=[], text="interrupted")

    monkeypatch.setattr("hwrl.run.loop.run_training", interrupted)
    target = tmp_path / "result.json"
    options = ["--steps", "1", "--rounds", "3", "--json", str(target), "rollout.n=8"]
    assert main(["bench", "async", *options]) == 130
    assert started == ["async-0 of 8"] and not target.exists() and not capsys.readouterr().out
