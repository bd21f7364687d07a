"""``hwrl train`` with real vLLM replicas, one of which is killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.plugins.vllm.serving import DTYPE
from tests.support.train_run import LORA, Run, adapter_nbytes, assert_whole, base_nbytes, sent

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]
WORKER, CORE = "VLLM::Worker", "VLLM::EngineCore"
VLLM = (
    "rollout.engine=vllm",
    "rollout.engine_options={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
    f"model.dtype={str(DTYPE).removeprefix('torch.')}",
)


def test_a_run_on_vllm_goes_on_when_a_replica_is_killed(start: Callable[..., Run]) -> None:
    run = start("rollout.replicas=2", *VLLM)
    run.wait_for_step(3, timeout_s=5000.0)
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.wait_for_output("a new replica starts")
    assert run.wait(timeout_s=5000.0) == 0, run.output()
    assert_whole(run)


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
