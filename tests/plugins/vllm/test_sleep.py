"""An engine that sleeps and wakes, on a device that vLLM has sleep mode for."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwrl.discovery import get_backend
from hwrl.errors import EngineError
from hwrl_vllm.engine import VllmEngine
from tests.plugins.vllm.serving import Policy, engine_of, generate, requests_of
from tests.plugins.vllm.vllm_server import of_page

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.skipif(
        get_backend().info.device_type == "cpu", reason="vLLM has no sleep mode on the CPU: set HWRL_BACKEND"
    ),
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module")
def engine(model_directory: Path) -> Iterator[VllmEngine]:
    engine = engine_of(model_directory, free_cache_engine=True)
    yield engine
    engine.close()


def test_after_level_1_the_weights_are_still_there(engine: VllmEngine, policy: Policy) -> None:
    engine.load_weights(policy.change().items(), version=1)
    assert engine.sleep(level=1) >= 64 << 20, "the attention cache at least"
    assert (engine.sleep(level=1), engine.version) == (0, 1)
    with pytest.raises(EngineError, match="it sleeps: kv_cache, weights"):
        engine.step()
    engine.wake()
    engine.wake()
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_after_level_2_weights_must_come_before_the_cache(engine: VllmEngine, policy: Policy) -> None:
    engine.load_weights(policy.change().items(), version=2)
    engine.sleep(level=2)
    assert engine.version == -1
    weights = policy.change()
    with pytest.raises(EngineError, match="it sleeps: weights"):
        engine.load_weights(weights.items(), version=3)
    engine.wake(["weights"])
    engine.load_weights(weights.items(), version=3)
    engine.wake(["kv_cache"])
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_the_calls_of_the_page(engine: VllmEngine, policy: Policy) -> None:
    engine.load_weights(policy.change().items(), version=7)
    block = of_page(r"```python\n(engine\.sleep.*?)```")
    exec(compile(block, "vllm.md", "exec"), {"engine": engine, "weights": policy.change().items()})
    assert engine.version == 8
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_an_engine_with_pending_requests_does_not_sleep(engine: VllmEngine) -> None:
    engine.submit(requests_of(1))
    with pytest.raises(EngineError, match=r"1 requests are pending(.|\n)*abort\(\)"):
        engine.sleep(level=1)
    engine.abort()
