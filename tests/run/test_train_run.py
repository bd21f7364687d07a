"""``hwrl train`` as a user runs it: real Ray, real processes, killed and continued."""

from __future__ import annotations

import gzip
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.support.speed import slow
from tests.support.train_run import Run, assert_interrupted, assert_whole, trained_prompts

pytestmark = pytest.mark.long(40)


def documented_keys() -> set[str]:
    """Return the keys in the table of docs/report.md; ``/x`` there goes on with the group of the key before it."""
    table = Path("docs/report.md").read_text(encoding="utf-8").partition("| metric | meaning |")[2].partition("\n\n")[0]
    keys: list[str] = []
    for row in table.splitlines()[2:]:
        for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
            keys.append(keys[-1].partition("/")[0] + name if name.startswith("/") else name)
    return set(keys)


OF_OTHER_RUNS = {
    *("sync/base_sent", "sync/base_nbytes", "sync/adapter_nbytes", "rollout/base_loads"),  # with an adapter
    *("rollout/sleeps", "rollout/freed_nbytes", "rollout/sleep_s"),  # of sleepers
    *("perf/mfu", "perf/recompilations"),  # of a device with a known peak, of compiled models
}


def assert_documented(found: set[str]) -> None:
    """The table has every key of a whole run, and none that no run has."""
    exact = {key for key in documented_keys() if "<" not in key}
    open_ended = "|".join(re.sub("<.*?>", "[^/]+", key) for key in documented_keys() - exact)
    assert sorted(key for key in found - exact if not re.fullmatch(open_ended, key)) == []
    assert exact - found == OF_OTHER_RUNS


def test_an_asynchronous_run_leaves_everything_a_person_looks_for(start: Callable[..., Run]) -> None:
    goals = "goals={eval/exact: 1.01, eval/exat: 0.9}"
    run = start("async_training.staleness_threshold=2", "train.profile_steps=[7,8]", "eval.before_training=true", goals)
    assert run.wait() == 1, run.output()
    assert "goal missed: eval/exact" in run.output()
    said = "the goal 'eval/exat' is not the name of a metric so far; did you mean 'eval/exact'?\n"
    assert run.output().count("is not the name of a metric") == 1 and said in run.output().partition("step 24/24")[0]
    assert_whole(run)
    untrained, *metrics = run.metrics()
    assert (untrained["step"], untrained["time_s"], untrained["eval/version"]) == (
        0,
        0,
        0,
    ) and "eval/exact" in untrained
    keys = {"step", "time_s", "reward/mean", "staleness/mean", "weights/version", "actor/loss", "trainer/idle_ratio"}
    assert all(keys <= line.keys() for line in metrics)
    assert [line["weights/version"] for line in metrics] == list(range(1, 25))
    assert max(line["staleness/max"] for line in metrics) == 2
    assert all(0 <= line["trainer/idle_ratio"] <= 1 and 0 <= line["rollout/idle_ratio"] <= 1 for line in metrics)
    assert metrics[-1]["eval/version"] == 24
    assert metrics[0]["actor/mismatch_kl"] < 1e-6, "the first tokens come from the published weights"
    saved = [line["step"] for line in metrics if {"checkpoint/blocked_s", "checkpoint/waited_s"} <= line.keys()]
    assert saved == [5, 10, 15, 20, 24]
    assert all((line["timing_s/save"] > 0) == (line["step"] - 1 in saved) for line in metrics[5:])
    assert_documented(set().union(*metrics))
    for name in ("config.yaml", "model/config.json", "checkpoints/latest_checkpointed_iteration.txt"):
        assert (run.directory / name).stat().st_size > 0
    assert list((run.directory / "tensorboard").iterdir())
    assert len(list((run.directory / "checkpoints").glob("global_step_*"))) == 2
    assert_fast_enough(run)
    trace = gzip.decompress((run.directory / "profile" / "steps_7-8.json.gz").read_bytes()).decode()
    counts = {part: trace.count(f'"name": "hwrl.{part}"') for part in ("sync", "update", "forward", "backward", "pack")}
    assert (counts["sync"], counts["update"]) == (2, 2) and all(counts.values())


def assert_fast_enough(run: Run) -> None:
    """The speed of the run is in its metrics and in its summary, and both sides are busy for a part of the time."""
    lines = run.metrics()[1:]  # after the untrained model
    assert all(line["perf/tokens_per_s_per_device"] > 0 and line["perf/imbalance"] == 1.0 for line in lines)
    assert all(line["perf/bottleneck"] in (0.0, 0.5, 1.0) for line in lines)
    assert sum(line["perf/step_s"] for line in lines) == pytest.approx(lines[-1]["time_s"], rel=0.1)
    said = re.search(r"bottleneck: .* busy .*; wall time is (\d+\.\d+) × the busy time of", run.output())
    assert said is not None and 1.0 <= float(said[1]) < 10


@pytest.mark.long(90)
def test_threshold_zero_trains_on_policy_and_the_other_transport_ranks_and_offload_work(
    start: Callable[..., Run],
) -> None:
    """Also through the deaths of one rank of two and of a replica, which sleeps while the ranks start again."""
    run = start(
        "async_training.staleness_threshold=0",
        "weights.bypass_cpu=false",
        "train.ranks=2",
        "train.param_offload=true",
        "train.optimizer_offload=true",
        "checkpoint.async_save=true",
        "rollout.free_cache_engine=true",
        "rollout.sleep_level=2",
        "algorithm.loss=decoupled",
        "algorithm.mini_batches=2",
    )
    run.wait_for_checkpoint(5)
    assert run.kill("ray::TrainActor", at_most=1) == 1
    run.wait_for_output("a trainer died")
    run.wait_for_step(12)
    assert run.kill("ray::RolloutActor") == 1
    run.wait_for_output("a new replica starts")
    assert run.wait() == 0, run.output()
    assert re.search("resumed after step (5|10)", run.output())
    assert_whole(run)
    metrics = run.metrics()
    assert all(line["staleness/max"] == 0 for line in metrics)
    assert all(min(line["weights/load_s"], line["weights/offload_s"]) > 0 for line in metrics)
    assert max(line["rollout/sleeps"] for line in metrics) >= 1
    assert "sync/base_sent" not in metrics[-1]


def interrupt(run: Run) -> None:
    run.process.send_signal(signal.SIGINT)


@pytest.mark.extended  # test_agents_run.py: the first half, in a run of agents
def test_a_signal_ends_the_run_cleanly_with_a_checkpoint_also_after_a_resume(start: Callable[..., Run]) -> None:
    """First as job managers end a run, then by Ctrl-C what continues it."""
    words = ("checkpoint.save_every_steps=0", "eval.every_steps=0", "train.steps=2000")
    last = 0
    for end, resume in ((Run.terminate_group, ()), (interrupt, ("resume=true",))):
        run = start(*words, *resume)
        run.wait_for_step(last + 3)
        end(run)
        assert_interrupted(run)
        assert run.output().count(f"resumed after step {last}") == len(resume)
        assert run.output().count("interrupted after step") == 1 + len(resume)
        last = int(run.metrics()[-1]["step"])


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        ("starting Ray", interrupt),
        pytest.param("starting Ray", Run.terminate_group, marks=pytest.mark.extended),
        ("building", Run.terminate_group),
    ],
)
def test_a_signal_before_the_first_step_ends_the_run_soon_and_in_one_line(
    start: Callable[..., Run], moment: str, end: Callable[[Run], None]
) -> None:
    run = start()
    run.wait_for_output(moment, timeout_s=2400)
    assert run.output().startswith("starting Ray on this machine\n"), "nothing of Ray's own comes first"
    end(run)
    assert run.wait(timeout_s=1200) == 130, run.output()
    told = run.output().splitlines()
    assert told[-1].startswith("hwrl: interrupted, and nothing more was saved") and len(told) == 3, run.output()
    run.wait_until_all_ended()


@pytest.mark.extended  # test_rollouter.py: the prompt has failed with the reason
def test_a_reward_that_always_raises_fails_the_run_and_says_why(start: Callable[..., Run], demo: Path) -> None:
    (demo / "bad.py").write_text("def reward(prompt, response, answer):\n    raise ValueError('no such unit')\n")
    run = start(f"reward.function={demo / 'bad.py'}:reward")
    assert run.wait() == 1
    assert "no such unit" in run.output()
    assert "Traceback" not in run.output()


@pytest.mark.extended  # test_model_files.py checks the message
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_lacks_a_tensor_ends_the_run_on_all_ranks_at_once(
    start: Callable[..., Run], demo: Path, ranks: int
) -> None:
    path = demo / "model" / "model.safetensors"
    save_file(
        {name: one for name, one in load_file(path).items() if name != "model.norm.weight"}, path, {"format": "pt"}
    )
    run = start(f"train.ranks={ranks}")
    assert run.wait() == 1
    assert "it lacks model.norm.weight" in run.output()
    assert "Traceback" not in run.output() and "start again" not in run.output()


def test_too_few_devices_are_an_error_and_not_a_silent_wait(start: Callable[..., Run], demo: Path) -> None:
    (demo / "scarce.py").write_text(
        "import hwrl_cpu\n"
        "from hwrl import BackendInfo, hookimpl\n"
        "from hwrl.interfaces import DeviceMap, ProbeResult\n"
        "INFO = BackendInfo(name='scarce', device_type='cpu', description='no machine here has it', api=(1, 0))\n"
        "hwrl_backend_info = hookimpl(specname='hwrl_backend_info')(lambda: INFO)\n"
        "hwrl_probe = hookimpl(specname='hwrl_probe')(lambda context: ProbeResult('yes', 'it pretends'))\n"
        "class Scarce(hwrl_cpu.CpuBackend):\n"
        "    devices = DeviceMap(ray_resource='SCARCE')\n"
        "hwrl_create_backend = hookimpl(specname='hwrl_create_backend')(lambda: Scarce(INFO))\n"
    )
    (demo / "scarce-1.dist-info").mkdir()
    (demo / "scarce-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: scarce\nVersion: 1\n")
    (demo / "scarce-1.dist-info" / "entry_points.txt").write_text("[hwrl.backends]\nscarce = scarce\n")
    run = start("train.ranks=2", HWRL_BACKEND="scarce", PYTHONPATH=str(demo))
    assert run.wait(timeout_s=600) == 1, run.output()
    assert "needs 2 devices" in run.output()


PPO = [
    *("algorithm.advantage=gae", "rollout.n=1", "train.batch_groups=16", "critic.warmup_steps=1"),
    *("critic.learning_rate=1e-3", "algorithm.kl_coeff=0.01", "train.optimizer_offload=true"),
]


@pytest.mark.long(130)
def test_terminated_and_frozen_processes_are_replaced_and_without_the_ledger_the_run_ends(
    start: Callable[..., Run], demo: Path
) -> None:
    """In one run, with a heartbeat of four seconds: each wait is told, ends, and loses no prompt.

    A trainer and a replica end at once, later they freeze at once, and then the ledger freezes. On a busy machine a
    healthy process may miss the heartbeat, too, and is replaced as well. The run has a critic, which goes back to the
    same checkpoint, and a divergence from the starting model.
    """
    run = start(f"timeouts.heartbeat_s={slow(4):g}", "train.steps=40", "checkpoint.save_every_steps=10", *PPO)
    run.wait_for_step(3)
    (demo / "config.yaml").unlink()  # the run has read it
    assert run.kill("ray::TrainActor") == 1
    run.signal("ray::RolloutActor", signal.SIGTERM)
    run.wait_for_output(f"no checkpoint in {run.directory} (checkpoint.save_every_steps=10): starting at step 0")
    assert "last checkpoint" not in run.output()
    run.wait_for_output("rollout replica-0 ended (The actor died")
    run.wait_for_step(13)
    run.signal("ray::RolloutActor", signal.SIGSTOP)
    run.signal("ray::TrainActor", signal.SIGSTOP)
    run.wait_for_output(f"a trainer died (trainer rank 0: it has not answered for timeouts.heartbeat_s={slow(4):g} s)")
    run.wait_for_output(f"rollout replica-0 ended (it has not answered for timeouts.heartbeat_s={slow(4):g} s)")
    run.wait_for_step(20)
    run.signal("ray::LedgerActor", signal.SIGSTOP)
    assert run.wait(timeout_s=600.0) == 1
    output = run.output()
    assert output.count("a trainer died (trainer rank 0: The actor died") == 1 and "resumed after step 10" in output
    assert re.search(rf"waiting for trainer rank 0: no answer for \d+ s \(limit {slow(4):g} s\)", output)
    assert "EngineError: the prompt ledger died" in output and "Traceback" not in output
    run.wait_until_all_ended()
    done = [line["step"] for line in run.metrics()]
    assert done == list(range(1, len(done) + 1))
    numbers = trained_prompts(run)
    assert sorted(numbers) == sorted(set(numbers)), "a prompt was trained on twice"
    assert min(line["staleness/mean"] for line in run.metrics()) >= 0
    assert_policy_and_critic_went_on_together(run.metrics())


def assert_policy_and_critic_went_on_together(lines: list[dict[str, float]]) -> None:
    assert all("critic/loss" in line and line["timing_s/critic"] > 0 for line in lines)
    assert ["actor/loss" in line for line in lines[:2]] == [False, True]
    assert lines[1]["actor/kl"] == pytest.approx(0, abs=1e-6), "the policy is the reference until its first step"
    assert lines[-1]["actor/kl"] > 0
    assert lines[10]["critic/learning_rate"] > 9e-4, "after the restart its schedule of 10 steps went on"
