"""``hwrl train`` with real vLLM replicas, one of which is killed."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest

from tests.distributed.test_train_run import Run, assert_whole, demo, start  # noqa: F401 - fixtures

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.timeout(1200),  # three starts of vLLM
]


def test_a_run_on_vllm_goes_on_when_a_replica_is_killed(start: Callable[..., Run]) -> None:  # noqa: F811 - the fixture
    run = start(
        "rollout.replicas=2",
        "rollout.engine=vllm",
        "rollout.engine_options={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
    )
    run.await_step(3, timeout_s=500.0)
    assert run.kill("ray::RolloutActor", at_most=1) == 1
    run.await_output("a new replica starts")
    assert run.wait(timeout_s=500.0) == 0, run.output()
    assert_whole(run)
