"""Simulated runs: the model of a replica, the staleness bound, failures, calibration, and published speed-ups."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hwrl.cli import main
from hwrl.errors import ConfigError, EngineError
from hwrl.rollout import LeaseQueue, PromptLease
from hwrl.run import Config, load_config
from hwrl.run.cluster.placement import Machines, choose_senders
from hwrl_simulate.calibration import as_measured, averages, calibrate, read_run, settled
from hwrl_simulate.events import EventQueue
from hwrl_simulate.fleet import SimulatedFleet, SimulatedLedger
from hwrl_simulate.replica import SimulatedReplica
from hwrl_simulate.simulation import SimulatedRun, simulate
from hwrl_simulate.size import SimulatedSize, placed, scaled, synchronous
from hwrl_simulate.text import limits_exceeded, result_of
from hwrl_simulate.workload import Lengths, Workload, assume
from tests.support.train_run import Run

MEASURED = Path(__file__).parents[2] / "support" / "measured_run.jsonl"
"""Lines of a real run: the demo with two replicas and 8 prompts a step, on two cores."""
OF_MEASURED = ("rollout.replicas=2", "rollout.n=16", "rollout.max_new_tokens=5", "rollout.max_running=256")
WORK = Workload(mean_tokens=200.0, full_step_s=0.04, train_token_s=1e-3, sync_fixed_s=0.5, update_s=0.2)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(
        f"dir: {tmp_path}/run\nmodel: {{path: {tmp_path}/model}}\ndata: {{train: {tmp_path}/t.jsonl}}\n"
        'reward: {function: "m:f"}\n'
        "rollout: {replicas: 3, n: 4, max_new_tokens: 1024, max_running: 16}\ntrain: {ranks: 1, batch_groups: 8}\n"
    )
    return tmp_path / "config.yaml"


def config_of(config_file: Path, *overrides: str) -> Config:
    return load_config(config_file, list(overrides))


# -- lengths and replicas -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mean", "sigma", "limit"), [(200.0, 1.0, 4096), (900.0, 1.5, 1024), (4.9, 0.5, 5)])
def test_drawn_lengths_have_the_mean(mean: float, sigma: float, limit: int) -> None:
    drawn = Lengths.with_mean(mean, sigma=sigma, limit=limit).draw(100_000, np.random.default_rng(0))
    assert drawn.mean() == pytest.approx(mean, rel=0.03)
    assert drawn.min() >= 1 and drawn.max() <= limit


def test_a_replica_decodes_all_responses_together() -> None:
    fleet = SimulatedFleet.__new__(SimulatedFleet)  # never asked
    replica = SimulatedReplica(
        "one",
        LeaseQueue(SimulatedLedger(fleet, "one")),
        slots=4,
        group_size=2,
        latency_s=1.0,
        response_s=0.5,
        now_s=0.0,
    )
    replica.start(PromptLease(0, 0, 0, 0), np.array([1.0, 3.0]))
    assert replica.next_event_s(wants_room=True) == 2.0 + 1.5 + 1.5, "a step with two responses, then two with one"
    assert not replica.advance(2.0 + 0.75)
    replica.start(PromptLease(1, 1, 0, 0), np.array([10.0, 1.0]))  # in the middle of the second step
    assert replica.room() == 0
    assert replica.next_event_s(wants_room=True) == pytest.approx(2.75 + 1.0 * 2.5), (
        "a response of the second group ends"
    )
    assert [group.tokens for group in replica.advance(2.75 + 2.5 + 0.5 * 2.0)] == [4.0]
    totals = [replica.totals(now_s) for now_s in (10.0, 20.0)]  # the last response ends after 8.5 further steps
    assert [seen["generate_s"] for seen in totals] == pytest.approx([10.0, 6.25 + 8.5 * 1.5])
    assert [seen["idle_s"] for seen in totals] == pytest.approx([0.0, 1.0])


def test_events_run_in_the_order_of_their_times() -> None:
    events, seen = EventQueue(), list[str]()

    def early() -> None:
        seen.append("early")
        events.at(0.5, lambda: seen.append("now"))

    events.after(2.0, lambda: seen.append("late"))
    events.after(1.0, early)
    while events.run_next():
        pass
    assert seen == ["early", "now", "late"]
    assert events.now_s == 2.0


# -- whole runs -----------------------------------------------------------------------------------------------------


def test_a_run_with_a_slow_trainer_is_as_fast_as_its_trainer(config_file: Path) -> None:
    work = replace(WORK, train_token_s=0.01, overhead_s=0.25, sigma=0.0)
    run = simulate(as_measured(config_of(config_file), 12), work)
    expected_s = 8 * 4 * 200 * 0.01 + 0.5 + 0.25
    assert [line["perf/step_s"] for line in run.lines[2:]] == pytest.approx([expected_s] * 10)
    assert run.lines[-1]["ledger/trained"] == 12 * 8
    assert averages(settled(run.lines))["trainer_idle"] < 0.05


@pytest.mark.parametrize("partial", ["true", "false"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_real_ledger_keeps_the_staleness_bound(config_file: Path, staleness: int, partial: str) -> None:
    words = (f"async_training.staleness_threshold={staleness}", f"async_training.partial_rollout={partial}")
    run = simulate(as_measured(config_of(config_file, *words), 15), replace(WORK, train_token_s=0.01))
    assert max(line["staleness/max"] for line in run.lines) == staleness
    assert run.lines[-1]["ledger/trained"] == 15 * 8


def test_with_long_tails_a_smaller_lead_keeps_tokens_young_and_waits_less_than_a_smaller_bound(
    config_file: Path,
) -> None:
    words = ("async_training.lead_versions=2", "async_training.staleness_threshold=")
    bound, lead = (
        simulate(as_measured(config_of(config_file, words[0], f"{words[1]}{most}"), 200), replace(WORK, sigma=1.3))
        for most in (2, 4)
    )
    ages = [statistics.mean(line["staleness/mean"] for line in run.lines[100:]) for run in (bound, lead)]
    assert ages == [pytest.approx(2.0, abs=0.1)] * 2
    assert lead.seconds < 0.9 * bound.seconds
    assert max(line["staleness/max"] for line in lead.lines) == 4, "long responses use the threshold"


def test_failures_cost_time_and_no_prompt(config_file: Path) -> None:
    config = config_of(config_file, "checkpoint.save_every_steps=5", "rollout.group_timeout_s=60")
    size = as_measured(config, 40)
    calm = simulate(size, WORK)
    work = replace(WORK, mtbf_h=0.1, hang_ratio=0.4, restart_s=30.0)
    hit = simulate(size, work, seed=3)
    assert hit.replica_deaths > 3 and hit.trainer_deaths > 0 and hit.lost_steps > 0
    assert hit.lines[-1]["ledger/trained"] == 40 * 8
    assert [line["step"] for line in hit.lines] == list(range(1, 41))
    told = "train.max_restarts=3 would have ended the run"
    assert (told in (limits_exceeded(hit) or "")) == (hit.trainer_deaths > 3)
    assert limits_exceeded(calm) is None
    assert hit.seconds > 1.1 * calm.seconds
    assert simulate(size, work, seed=3).lines == hit.lines, "a seed repeats a run"


def test_the_time_of_a_trainers_death_counts_in_the_results(config_file: Path) -> None:
    config = config_of(config_file, "train.ranks=4", "rollout.replicas=10", "checkpoint.save_every_steps=0")
    size = as_measured(config, 40)
    hit = simulate(size, replace(WORK, mtbf_h=0.4, restart_s=60.0), seed=1)
    assert hit.trainer_deaths > 0 and hit.lost_steps > 8, "after the first fifth, so the results are of the steps after"
    assert sum(line["perf/step_s"] for line in hit.lines) == pytest.approx(hit.seconds)
    row, calm = result_of(hit), result_of(simulate(size, replace(WORK, mtbf_h=1e9)))
    assert row["step_s"] * 32 > calm["step_s"] * (32 + hit.lost_steps) + 60 * hit.trainer_deaths - 60
    assert row["tokens_per_s"] < calm["tokens_per_s"]


def test_the_results_do_not_have_the_end_of_the_prompts(config_file: Path) -> None:
    config = config_of(config_file, "async_training.staleness_threshold=8", "train.ranks=2")
    work = replace(WORK, train_token_s=2e-3, mtbf_h=1e9, sigma=0.5)
    short, long = (result_of(simulate(as_measured(config, steps), work)) for steps in (30, 300))
    assert short["rollout_idle"] == pytest.approx(long["rollout_idle"], abs=0.05)
    assert short["step_s"] == pytest.approx(long["step_s"], rel=0.05)


def test_idle_time_is_never_negative(config_file: Path) -> None:
    config = config_of(config_file, "async_training.trigger_parameter_sync_step=4")
    run = simulate(as_measured(config, 30), replace(WORK, update_s=4.0, mtbf_h=1e9))
    assert min(line["rollout/idle_s"] for line in run.lines) > -1e-6, "between two transfers, and in a pause"


def test_too_many_failures_end_the_run_as_they_would_end_a_real_one(config_file: Path) -> None:
    with pytest.raises(EngineError, match="failed 3 times"):
        simulate(as_measured(config_of(config_file), 5), replace(WORK, failed_ratio=0.9))


def test_a_run_that_never_comes_to_a_checkpoint_is_an_error(config_file: Path) -> None:
    with pytest.raises(EngineError, match="makes no progress"):
        simulate(as_measured(config_of(config_file), 20), replace(WORK, mtbf_h=0.01))


def test_more_devices_train_more_tokens_with_the_same_idle_shares(config_file: Path) -> None:
    config = config_of(config_file)
    few, many = (averages(settled(simulate(scaled(config, n, steps=30), WORK).lines)) for n in (8, 128))
    assert many["tokens_per_s"] == pytest.approx(16 * few["tokens_per_s"], rel=0.15)
    assert many["rollout_idle"] == pytest.approx(few["rollout_idle"], abs=0.1)


def test_the_synchronous_baseline_takes_turns(config_file: Path) -> None:
    size = scaled(config_of(config_file), 16, steps=12)
    both = synchronous(size)
    assert both.shared and both.config.train.ranks == both.config.rollout.replicas == 16
    run = simulate(both, WORK)
    for line in run.lines:
        assert line["staleness/max"] == 0.0
    assert result_of(simulate(size, WORK), run)["speedup"] > 1.0


def test_too_few_devices_are_refused(config_file: Path) -> None:
    words = ("rollout.engine=other", "rollout.tensor_parallel=8")
    with pytest.raises(ConfigError, match="needs 9 devices"):
        scaled(config_of(config_file, *words), 8, steps=1)


@pytest.mark.parametrize("words", [(), ("weights.senders=1",)])
def test_the_placement_is_that_of_a_real_run(config_file: Path, words: tuple[str, ...]) -> None:
    for ranks, replicas in [(1, 3), (4, 4), (4, 5), (8, 8), (16, 3), (3, 30)]:
        config = config_of(config_file, *words, f"train.ranks={ranks}", f"rollout.replicas={replicas}")
        machines = Machines(
            [str(rank // 8) for rank in range(ranks)], [str((ranks + place) // 8) for place in range(replicas)]
        )
        expected, _ = choose_senders(
            config.weights.senders, transport="device", ranks=ranks, machines=machines, own_devices=True
        )
        assert placed(config).senders == expected, (ranks, replicas)


# -- calibration ----------------------------------------------------------------------------------------------------


def test_a_simulation_is_found_again_from_its_own_metrics(config_file: Path) -> None:
    config = config_of(config_file, "checkpoint.save_every_steps=0")
    truth = replace(WORK, train_token_s=0.002, mtbf_h=1e9)
    lines = simulate(as_measured(config, 60), truth).lines
    found = calibrate(config, settled(lines), Workload())
    assert found.mean_tokens == pytest.approx(200, rel=0.1)
    assert found.full_step_s == pytest.approx(truth.full_step_s, rel=0.15)
    assert found.train_token_s == pytest.approx(truth.train_token_s, rel=0.01)
    assert found.sync_fixed_s == pytest.approx(0.5, rel=0.01)
    assert found.update_s == pytest.approx(0.2, rel=0.05)
    assert found.sigma == pytest.approx(1.0, abs=0.35)


def found_in(size: SimulatedSize, truth: Workload, **assumed: float) -> Workload:
    """Return what a calibration finds in the metrics of a simulation of ``truth``."""
    return calibrate(size.config, settled(simulate(size, truth).lines), Workload(**assumed))


def test_the_training_time_of_a_few_rows_on_many_ranks_is_found_again(config_file: Path) -> None:
    size = as_measured(config_of(config_file, "train.ranks=16", "train.batch_groups=8"), 60)
    truth = replace(WORK, train_token_s=0.01, mtbf_h=1e9)
    found = found_in(size, truth)
    assert found.train_token_s == pytest.approx(0.01, rel=0.01), "the longest row takes longest, on one rank"
    assert found.train_sigma == pytest.approx(0.0, abs=0.01)


def test_the_fixed_training_time_is_not_counted_twice(config_file: Path) -> None:
    truth = replace(WORK, train_token_s=0.002, train_fixed_s=5.0, mtbf_h=1e9)
    size = as_measured(config_of(config_file), 60)
    assert found_in(size, truth, train_fixed_s=5.0).train_token_s == pytest.approx(0.002, rel=0.01)
    assert found_in(size, truth, train_fixed_s=5.0).train_sigma == pytest.approx(0.0, abs=0.01)
    with pytest.raises(ConfigError, match="train_fixed_s=500"):
        found_in(size, truth, train_fixed_s=500.0)


def test_the_fixed_time_of_a_transfer_by_several_senders_is_found_again(config_file: Path) -> None:
    size = as_measured(config_of(config_file, "train.ranks=8", "rollout.replicas=8"), 40)
    assert size.senders > 1
    truth = replace(WORK, sync_nbytes=size.senders * 5e11, sync_fixed_s=2.0, mtbf_h=1e9)
    assert found_in(size, truth).sync_fixed_s == pytest.approx(2.0, rel=0.01)


def test_the_time_of_a_critic_counts_as_training(config_file: Path) -> None:
    config = config_of(config_file)
    lines = simulate(as_measured(config, 60), replace(WORK, train_token_s=0.002, mtbf_h=1e9)).lines
    with_critic = [
        {**line, "timing_s/critic": line["timing_s/train"], "perf/step_s": line["perf/step_s"] + line["timing_s/train"]}
        for line in settled(lines)
    ]
    found = calibrate(config, with_critic, Workload())
    assert found.train_token_s == pytest.approx(0.004, rel=0.01)
    assert found.overhead_s == pytest.approx(0.0, abs=0.01)


def test_the_pauses_of_replicas_are_divided_by_their_number(config_file: Path) -> None:
    size = as_measured(config_of(config_file, "async_training.trigger_parameter_sync_step=4"), 15)
    found = found_in(size, replace(WORK, mtbf_h=1e9))  # 12 lines: they begin with a version, and two follow
    assert found.update_s == pytest.approx(0.2, rel=0.01)


@pytest.mark.parametrize(
    ("name", "value"),
    [("timing_s/train", 0.0), ("perf/step_s", -1.0), ("response/tokens", math.nan), ("rollout/tokens_per_s", None)],
)
def test_a_run_without_a_needed_value_calibrates_nothing(tmp_path: Path, name: str, value: float | None) -> None:
    lines = [json.loads(text) for text in MEASURED.read_text().splitlines()]
    for line in lines:
        line[name] = value
        if value is None:
            del line[name]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=rf"(?s)cannot calibrate.*{name}"):
        read_run(tmp_path)


def test_a_run_in_which_no_replica_generated_calibrates_nothing(tmp_path: Path) -> None:
    lines = [json.loads(text) | {"rollout/generate_s": 0.0} for text in MEASURED.read_text().splitlines()]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ConfigError, match=r"(?s)cannot calibrate.*rollout/generate_s"):
        read_run(tmp_path)


def assert_close(real: list[dict[str, float]], config: Config, *, rel: float) -> None:
    """Check the simulation of a real run, calibrated on it, beside the run."""
    work = replace(calibrate(config, real, Workload()), mtbf_h=1e9)
    measured = averages(real)
    runs = [averages(settled(simulate(as_measured(config, 60), work, seed=seed).lines)) for seed in range(3)]
    for name in ("step_s", "tokens_per_s"):
        assert statistics.mean(run[name] for run in runs) == pytest.approx(measured[name], rel=rel), name
    for name in ("trainer_idle", "rollout_idle"):
        assert statistics.mean(run[name] for run in runs) == pytest.approx(measured[name], abs=0.1), name
    assert {run["staleness_max"] for run in runs} == {measured["staleness_max"]}


def test_a_simulation_is_near_a_recorded_run(config_file: Path) -> None:
    assert_close(read_run(MEASURED), config_of(config_file, *OF_MEASURED), rel=0.1)


@pytest.mark.extended  # the recorded run above is checked always
@pytest.mark.long(120)
def test_a_simulation_is_near_a_run(demo: Path) -> None:
    words = ("train.steps=60", "goals={}", "checkpoint.save_every_steps=0", "eval.every_steps=0")
    with contextlib.closing(Run(demo, *words)) as run:
        assert run.wait() == 0, run.output()
    config = load_config(demo / "config.yaml", list(words))
    assert_close(read_run(run.directory / "metrics.jsonl"), config, rel=0.1)


def test_a_file_without_timings_calibrates_nothing(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "time_s": 1.0}\n')
    with pytest.raises(ConfigError, match="cannot calibrate"):
        read_run(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot calibrate"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match="there is no such file"):
        read_run(tmp_path / "none")


# -- published speed-ups, docs/simulate.md ----------------------------------------------------------------------------


@pytest.mark.extended
def test_published_steps_are_between_those_of_the_nearest_settings(config_file: Path) -> None:
    """Published: synchronous 356 s, streamed 231 s, staleness 0.5 151 s. hwrl counts staleness in whole versions."""
    tokens = 512 * 16 * 3000
    train_token_s, shared_s = 113.16 * 64 / tokens, (113.81 + 53.92) * 128 / tokens
    work = Workload(
        mean_tokens=3000.0,
        sigma=1.2,
        full_step_s=0.02,
        latency_share=0.22,
        train_token_s=train_token_s,
        shared_train_ratio=shared_s / train_token_s,
        switch_s=10.72,
        sync_fixed_s=4.0,
        update_s=4.0,
        mtbf_h=1e9,
    )
    base = ["rollout.replicas=64", "train.ranks=64", "train.batch_groups=128", "rollout.n=16"]
    base += ["rollout.max_new_tokens=28672", "rollout.max_running=256", "async_training.trigger_parameter_sync_step=4"]
    sizes = [
        scaled(config_of(config_file, *base, f"async_training.staleness_threshold={bound}"), 128, steps=32)
        for bound in (0, 1)
    ]
    streamed, stale = (4 * averages(settled(simulate(size, work).lines))["step_s"] for size in sizes)
    turns = averages(settled(simulate(synchronous(sizes[0]), work).lines))["step_s"]
    assert turns == pytest.approx(356.3, rel=0.1), "fitted to it"
    assert streamed == pytest.approx(231.3, rel=0.1), "predicted"
    assert stale < 150.6 < streamed, "predicted"


@pytest.mark.extended
def test_10_000_devices_take_less_than_a_minute_of_one_core(config_file: Path) -> None:
    size = scaled(config_of(config_file), 10_000, steps=20)
    began_s = time.process_time()
    simulate(size, WORK)
    assert time.process_time() - began_s < 60


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command_prints_a_row_for_each_size(config_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", str(config_file), "--devices", "8,64", "--steps", "8", "--beside-sync"]
    assert main([*words, "--assume", "sigma=0.5", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [row["devices"] for row in shown["sizes"]] == [8, 64]
    assert shown["sizes"][0]["speedup"] > 0
    assert (shown["assumptions"]["sigma"], shown["sources"]["sigma"]) == (0.5, "--assume")
    assert main(["simulate", str(config_file), "--devices", "4", "--metrics", str(MEASURED), *OF_MEASURED]) == 0
    assert "| train_token_s |" in (text := capsys.readouterr().out)
    assert "| measured |" in text and "| default |" in text


def test_a_row_is_shown_before_the_next_size_is_simulated(
    config_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def note_and_simulate(*args: Any, **options: Any) -> SimulatedRun:
        shown.append(capsys.readouterr().out)
        return simulate(*args, **options)

    monkeypatch.setattr("hwrl_simulate.simulation.simulate", note_and_simulate)
    assert main(["simulate", str(config_file), "--devices", "4,8", "--steps", "4"]) == 0
    assert shown[0].startswith("| devices |") and "| 4 |" not in shown[0] and shown[1].startswith("| 4 |")


@pytest.mark.parametrize("word", ["sigma", "speed=3", "sigma=fast", "hang_ratio=2", "mtbf_h=0", "sigma=-1"])
def test_an_impossible_assumption_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="assumption"):
        assume(Workload(), [word])


def test_a_long_simulation_tells_its_progress_and_a_too_large_one_is_refused(
    config_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hwrl_simulate.simulation.TELL_S", 0.0)
    assert main(["simulate", str(config_file), "--devices", "4", "--steps", "4"]) == 0
    assert "4 devices: step 3 of 4\n" in capsys.readouterr().err
    for words in (["--devices=1048576"], ["--devices=8", "--seed=-1"], ["--devices=1"]):
        with pytest.raises(SystemExit, match="2"):
            main(["simulate", str(config_file), *words])
