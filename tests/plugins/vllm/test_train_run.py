"""``hwrl train`` with real vLLM replicas, one of which is killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from hwrl.discovery import get_backend
from tests.plugins.vllm.serving import DTYPE, ON_HOST
from tests.support.train_run import LORA, TWO, Run, adapter_nbytes, assert_whole, base_nbytes, late_reward, sent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]
WORKER, CORE = "VLLM::Worker", "VLLM::EngineCore"
VLLM = (
    "rollout.engine=vllm",
    "rollout.engine_options={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
    f"model.dtype={str(DTYPE).removeprefix('torch.')}",
)
SHORT = ("train.steps=6", "eval.every_steps=0", "checkpoint.save_every_steps=0")
SAME_POLICY = 5e-3
"""The most that the tokens' log-probabilities may differ between trainer and replica; with other weights it is more."""


def assert_each_version_is_received(run: Run, *, receivers: int) -> None:
    metrics = run.metrics()
    assert [line["step"] for line in metrics] == list(range(1, 7))
    assert [line["sync/receivers"] for line in metrics] == [receivers] * 6, run.output()
    assert max(line["actor/mismatch_kl"] for line in metrics) < SAME_POLICY


def test_a_run_on_vllm_goes_on_when_a_replica_is_killed(start: Callable[..., Run]) -> None:
    run = start("rollout.replicas=2", *VLLM)
    run.wait_for_step(3, timeout_s=5000.0)
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.wait_for_output("a new replica starts")
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert_whole(run)


@pytest.mark.skipif(not ON_HOST and get_backend().device_count() < 4, reason="needs four devices")
@pytest.mark.parametrize("partial", ["false", pytest.param("true", marks=pytest.mark.extended)])
def test_two_ranks_train_with_two_replicas_that_take_weights_in_or_between_responses(
    start: Callable[..., Run], partial: str
) -> None:
    run = start(*TWO, *VLLM, *SHORT, f"async_training.partial_rollout={partial}")
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert_each_version_is_received(run, receivers=2)


@pytest.mark.skipif(ON_HOST, reason="vLLM has no sleep mode on the CPU")
@pytest.mark.parametrize("level", [1, 2])
def test_a_replica_sleeps_at_each_level_on_the_trainers_device(
    start: Callable[..., Run], demo: Path, level: int
) -> None:
    sleep = ("rollout.free_cache_engine=true", f"rollout.sleep_level={level}", "train.param_offload=true")
    rest = ("train.optimizer_offload=true", "async_training.staleness_threshold=0", late_reward(demo))
    few = ("train.batch_groups=2", "rollout.n=2")
    run = start(*sleep, *rest, *few, *VLLM, *SHORT, **get_backend().devices.render([0]))
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert "share the trainer's devices" in " ".join(run.output().split()), run.output()
    assert_each_version_is_received(run, receivers=1)
    assert sum(line["rollout/sleeps"] for line in run.metrics()) >= 1


def test_a_replica_of_two_workers_that_is_killed_leaves_none_of_them(start: Callable[..., Run]) -> None:
    run = start("rollout.tensor_parallel=2", *VLLM)
    run.wait_for_step(3, timeout_s=5000.0)
    workers, cores = run.processes(WORKER), run.processes(CORE)
    assert (len(workers), len(cores)) == (2, 1) and run.kill("ray::RolloutActor") == 1
    run.wait_for_output("a new replica starts")
    run.wait_for_step(int(run.metrics()[-1]["step"]) + 2, timeout_s=5000.0)
    assert not {*workers, *cores} & {*run.processes(WORKER), *run.processes(CORE)}
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert not run.processes(WORKER) and not run.processes(CORE)
    assert_whole(run)


def test_a_killed_replica_of_an_adapters_run_gets_the_base_again(start: Callable[..., Run], demo: Path) -> None:
    run = start(*LORA, *VLLM)
    run.wait_for_step(3, timeout_s=5000.0)
    assert run.kill("ray::RolloutActor") == 1
    run.wait_for_output("a new replica starts")
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert_whole(run)
    assert sent(run, "base_nbytes")[1:3] == [0, 0] and sum(sent(run, "base_nbytes")) == 2 * base_nbytes(demo)
    assert set(sent(run, "adapter_nbytes")[1:3]) == {adapter_nbytes(run)}
