"""Adapters in real vLLM on the host: tokens are those of transformers with the same base and the same adapter."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, EngineError, UnsupportedError
from hwrl.interfaces import LoraSettings, RolloutSettings
from hwrl.run.demo import write_demo
from hwrl_vllm.engine import VllmEngine
from tests.plugins.vllm.serving import (
    BLOCK,
    ON_HOST,
    Policy,
    engine_of,
    finish,
    generate,
    requests_of,
    write_model,
)

REPO = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM warns of its own use of what is deprecated
]
LORA = LoraSettings(rank=4, alpha=6.0)  # a scale other than 1, and a rank that vLLM has no room of the size of
BASE = 0xBA5E
_versions = itertools.count()


@pytest.fixture(scope="module")
def policy(model_directory: Path) -> Policy:
    return Policy(model_directory, lora=LORA)


@pytest.fixture(scope="module")
def shared_engine(model_directory: Path) -> Iterator[VllmEngine]:
    engine = engine_of(model_directory, lora=LORA)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: VllmEngine, policy: Policy) -> Iterator[VllmEngine]:
    """The engine with a base and an adapter that ``policy`` has, too."""
    shared_engine.load_base(policy.change().items(), base=BASE)
    shared_engine.load_adapter(policy.change_adapter().items(), version=next(_versions), base=BASE)
    yield shared_engine
    shared_engine.abort()


def check_serving(engine: VllmEngine, policy: Policy) -> None:
    requests = requests_of(4)
    responses = generate(engine, requests)
    policy.check_greedy(requests, responses)
    assert {version for one in responses.values() for version in one.versions.tolist()} == {engine.version}


@pytest.mark.skipif(ON_HOST, reason="on the host adapters may be float32")
def test_an_adapter_that_the_devices_kernels_cannot_serve_is_refused(policy: Policy) -> None:
    settings = RolloutSettings(
        model_directory=Path(policy.model.config.name_or_path),
        dtype=torch.float32,
        eos_ids=[1],
        max_running=4,
        max_length=64,
        lora=LORA,
    )
    with pytest.raises(ConfigError, match=r"float32(.|\n)*model\.dtype=bfloat16"):
        VllmEngine(settings, options={}, backend=get_backend())


def test_each_adapter_is_served_on_the_base_that_is_there(engine: VllmEngine, policy: Policy) -> None:
    for _ in range(10):
        engine.load_adapter(policy.change_adapter().items(), version=next(_versions), base=BASE)
        check_serving(engine, policy)


def test_another_base_waits_for_its_adapter(engine: VllmEngine, policy: Policy) -> None:
    engine.load_base(policy.change().items(), base=7)
    assert (engine.base, engine.version) == (7, -1)
    engine.submit(requests_of(1))
    with pytest.raises(EngineError, match="the engine has no weights"):
        engine.step()
    engine.abort()
    engine.load_adapter(policy.change_adapter().items(), version=next(_versions), base=7)
    check_serving(engine, policy)


def test_requests_go_on_with_the_new_adapter_and_others_read_nothing_of_before(
    engine: VllmEngine, policy: Policy
) -> None:
    first, old = requests_of(4, prompt=2 * BLOCK + 6, new=56), engine.version
    adapter, new = policy.change_adapter(), next(_versions)
    engine.submit(first)
    engine.step()
    engine.load_adapter(adapter.items(), version=new, base=BASE)
    others = requests_of(2, prompt=2 * BLOCK + 6, new=20)  # the same prompts
    engine.submit(others)
    responses = finish(engine)
    crossed = [responses[request.request_id].versions.tolist() for request in first if request.request_id in responses]
    assert all(versions == sorted(versions) and versions[0] == old for versions in crossed)
    assert any(versions[-1] == new for versions in crossed)
    policy.check_greedy(others, responses)


@pytest.mark.parametrize("wrong", ["base", "name", "shape"])
def test_what_does_not_belong_is_refused_and_the_old_version_serves(
    engine: VllmEngine, policy: Policy, wrong: str
) -> None:
    served = engine.version
    adapter = {name: tensor.clone() for name, tensor in policy.change_adapter().items()}
    engine.load_adapter(adapter.items(), version=served, base=BASE)
    name, tensor = next(iter(adapter.items()))
    if wrong == "shape":
        adapter[name] = tensor[1:]
    elif wrong == "name":
        adapter[f"{name}.more"] = tensor
    with pytest.raises(EngineError, match=r"(does|do) not belong to"):
        engine.load_adapter(adapter.items(), version=next(_versions), base=3 if wrong == "base" else BASE)
    assert (engine.version, engine.base) == (served, BASE)
    check_serving(engine, policy)


def test_an_adapter_that_was_loaded_is_neither_kept_nor_changed(engine: VllmEngine, policy: Policy) -> None:
    adapter = policy.change_adapter()
    before = {name: tensor.clone() for name, tensor in adapter.items()}
    engine.load_adapter(adapter.items(), version=next(_versions), base=BASE)
    assert all(tensor.equal(before[name]) for name, tensor in adapter.items())
    for tensor in adapter.values():
        tensor.fill_(7.0)
    check_serving(engine, policy)


def test_an_engine_with_an_adapter_takes_no_whole_model(engine: VllmEngine, policy: Policy) -> None:
    with pytest.raises(UnsupportedError, match="takes no whole model"):
        engine.load_weights(policy.change().items(), version=next(_versions))


def test_an_adapter_in_layers_in_which_vllm_has_none_is_refused_at_the_start(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2")
    lora = LoraSettings(rank=4, alpha=8.0, target_modules=("q_proj", "lm_head"))
    with pytest.raises(
        ConfigError, match=r"supports no adapter in lm_head \(1 in all\)(.|\n)*out of model\.target_modules"
    ):
        engine_of(tmp_path, lora=lora)


def test_an_adapter_in_every_linear_layer_has_its_places_in_merged_ones(tmp_path: Path) -> None:
    write_model(tmp_path, "qwen2")
    policy = Policy(tmp_path, lora=LORA)
    engine = engine_of(tmp_path, lora=LORA)
    engine.load_base(policy.change().items(), base=BASE)
    engine.load_adapter(policy.change_adapter().items(), version=next(_versions), base=BASE)
    check_serving(engine, policy)
    engine.close()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_an_adapter_is_served_after_each_level_of_sleep(tensor_parallel: int, tmp_path: Path) -> None:
    if not ON_HOST and get_backend().device_count() < tensor_parallel:
        pytest.skip("needs two devices")
    model = write_demo(tmp_path, seed=1, prompts=16).with_name("model")
    command = [sys.executable, "-m", "tests.plugins.vllm.sleep_with_adapter", str(model), str(tensor_parallel)]
    ended = subprocess.run(command, cwd=REPO, text=True, capture_output=True, timeout=5000, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
