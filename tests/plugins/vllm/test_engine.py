"""Real vLLM on the chosen backend, beside transformers: tokens, log-probabilities, versions, and updates that fail."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import itertools
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hwrl.comm import serve_store
from hwrl.discovery import get_backend
from hwrl.errors import ConfigError, EngineError, TransferFailedError, UnsupportedError
from hwrl.weights import TransportName, WeightReceiver, WeightSender
from hwrl_vllm.core import InlineCore, ProcessCore
from hwrl_vllm.engine import VllmEngine
from tests.plugins.vllm.linked import Linked, interrupted
from tests.plugins.vllm.serving import (
    BLOCK,
    LONGEST,
    ON_HOST,
    Policy,
    engine_of,
    finish,
    generate,
    requests_of,
    write_model,
)
from tests.support.speed import slow
from tests.support.weight_link import beside

REPO = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM warns of its own use of what is deprecated
]

PLAIN = "HWRL_TEST_PLAIN"
_versions = itertools.count()
LATER = ("ipc", "host") if ON_HOST else ("host",)


def parameters() -> list[torch.nn.Parameter]:
    """Return those that the process holds and that have memory."""
    gc.unfreeze()  # vLLM hides what it holds from the collector
    found = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Parameter)]
    return [one for one in found if one.device.type != "meta"]


@pytest.fixture(scope="module")
def parameters_before(policy: Policy) -> list[weakref.ref[torch.nn.Parameter]]:
    """What the process held before the engine was made, the policy's included."""
    return [weakref.ref(one) for one in parameters()]


@pytest.fixture(scope="module", params=["process", pytest.param("inline", marks=pytest.mark.extended)])
def shared_engine(
    policy: Policy,
    model_directory: Path,
    parameters_before: list[weakref.ref[torch.nn.Parameter]],
    request: pytest.FixtureRequest,
) -> Iterator[VllmEngine]:
    for checkpoint in model_directory.glob("*.safetensors"):  # a rollout process reads none
        checkpoint.unlink()
    engine = engine_of(model_directory, engine_core=request.param)
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: VllmEngine, policy: Policy) -> Iterator[VllmEngine]:
    """The engine with weights that ``policy`` has, too."""
    shared_engine.load_weights(policy.change().items(), version=next(_versions))
    yield shared_engine
    shared_engine.abort()


@pytest.mark.parametrize(
    "transport", ["device" if ON_HOST else "ipc", *(pytest.param(t, marks=pytest.mark.extended) for t in LATER)]
)
def test_greedy_tokens_equal_transformers_after_each_of_20_updates_into_the_workers_weights(
    engine: VllmEngine, policy: Policy, transport: str
) -> None:
    if transport == "ipc" and isinstance(engine.core, InlineCore):
        pytest.skip("a process does not open its own memory")
    requests = requests_of(4)
    with Linked(engine, transport) as linked:
        for version in range(100, 120):
            running = requests_of(2, new=60)
            engine.submit(running)
            engine.step()
            assert linked.update(version, policy.change())
            responses = generate(engine, requests)
            policy.check_greedy(requests, {one.request_id: responses[one.request_id] for one in requests})
            versions = [set(responses[one.request_id].versions.tolist()) for one in requests]
            assert versions == [{version}] * len(requests)


def test_versions_that_are_received_whole_serve_until_the_next_is_loaded(engine: VllmEngine, policy: Policy) -> None:
    requests, store = requests_of(4), serve_store()
    transport: TransportName = "device" if ON_HOST else "host"  # on devices the two ends of one process make no group
    with (
        WeightSender(store, transport=transport, timeout_s=600.0) as sender,
        WeightReceiver(store, replica="r0") as receiver,
    ):
        for version in range(200, 203):
            weights = policy.change()
            publishing = beside(functools.partial(sender.publish, version, weights.items()))
            received = receiver.receive()
            publishing()
            engine.load_weights(received.items(), version=received.version)
            policy.check_greedy(requests, generate(engine, requests))


def test_a_transfer_that_ends_in_the_middle_serves_no_mixture_and_a_whole_one_repairs(
    engine: VllmEngine, policy: Policy
) -> None:
    def fail() -> None:
        raise KeyError("the trainer fails")

    running = requests_of(2, new=30)
    engine.submit(running)
    engine.step()
    with Linked(engine, "device" if ON_HOST else "ipc") as linked:
        with pytest.raises(KeyError):
            linked.update(300, interrupted(policy.change(), fail))
        assert engine.version == -1
        (waiting,) = requests_of(1)
        engine.submit([waiting])
        with pytest.raises(EngineError, match="requests are pending, but the engine has no weights"):
            engine.step()
        assert linked.update(301, policy.change())
        responses = finish(engine)
        assert {*responses} >= {one.request_id for one in (*running, waiting)}
        assert set(responses[waiting.request_id].versions.tolist()) == {301}
        requests = requests_of(3)
        policy.check_greedy(requests, generate(engine, requests))


def test_another_models_version_is_refused_before_it_is_received(engine: VllmEngine, policy: Policy) -> None:
    served, weights = engine.version, policy.model.state_dict()
    other = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    with Linked(engine, "host") as linked, pytest.raises(EngineError, match=r"unknown: \['model.extra'\]"):
        linked.update(400, {**other, "model.extra": torch.zeros(3, device=get_backend().device())})
    assert engine.version == served
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def forcing(policy: Policy, token: int) -> dict[str, torch.Tensor]:
    """Return weights of the policy's form that generate ``token`` after anything."""
    weights = {name: torch.zeros_like(tensor) for name, tensor in policy.model.state_dict().items()}
    for name, tensor in weights.items():
        if "norm" in name or "embed_tokens" in name:
            tensor.fill_(1.0)
    weights["lm_head.weight"][token] = 1.0
    return {name: tensor.to(get_backend().device()) for name, tensor in weights.items()}


def test_each_token_has_the_version_of_the_weights_that_forced_it(engine: VllmEngine, policy: Policy) -> None:
    if isinstance(engine.core, InlineCore):
        assert engine.vllm.engine_core.engine_core.batch_queue is not None, "vLLM schedules asynchronously"
    token_of = {version: 2 + version % 13 for version in range(2000, 2030)}
    engine.load_weights(forcing(policy, 2).items(), version=1999)
    token_of[1999] = 2
    responses = []
    for version in range(2000, 2030):
        weights = forcing(policy, token_of[version])
        engine.submit(requests_of(engine.capacity(), new=LONGEST - 6))
        responses += [done.response for _ in range(version % 4) for done in engine.step()]
        engine.load_weights(weights.items(), version=version)
    responses += finish(engine).values()
    assert sum(len(set(response.versions.tolist())) > 2 for response in responses) > 4
    for response in responses:
        assert [token_of[version] for version in response.versions.tolist()] == response.token_ids.tolist()


def test_requests_go_on_across_an_update_and_others_read_nothing_of_before(engine: VllmEngine, policy: Policy) -> None:
    first, old = requests_of(8, prompt=2 * BLOCK + 6, new=56), engine.version
    others = [replace(request, prompt_ids=first[0].prompt_ids) for request in requests_of(2, new=20)]
    weights, new = policy.change(), next(_versions)
    engine.submit(first)
    engine.step()
    engine.submit(others[:1])  # it may have no token yet when the weights change
    engine.load_weights(weights.items(), version=new)
    engine.submit(others[1:])
    responses = finish(engine)
    crossed = [responses[request.request_id].versions.tolist() for request in first if request.request_id in responses]
    assert all(versions == sorted(versions) and versions[0] == old for versions in crossed)
    assert any(versions[-1] == new for versions in crossed)
    whole = [one for one in others if set(responses[one.request_id].versions.tolist()) == {new}]
    assert others[1] in whole
    policy.check_greedy(whole, responses)


def test_what_does_not_fit_is_refused_and_nothing_of_it_is_taken(engine: VllmEngine) -> None:
    with pytest.raises(EngineError, match=f"together at most {LONGEST} fit"):
        engine.submit([*requests_of(1), *requests_of(1, new=LONGEST)])
    assert engine.pending() == 0


def test_a_temperature_that_vllm_does_not_take_as_it_is_is_refused(engine: VllmEngine, model_directory: Path) -> None:
    with pytest.raises(EngineError, match=r"at temperature 2\.5(.|\n)*set rollout\.temperature"):
        engine.submit([*requests_of(1), *requests_of(1, temperature=2.5)])
    assert engine.pending() == 0
    with pytest.raises(ConfigError, match=r"rollout\.temperature=2\.5 cannot be used with vLLM"):
        engine_of(model_directory, temperature=2.5)


def test_a_request_that_vllm_refuses_is_told_with_its_reason(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise ValueError("the queue is full")

    monkeypatch.setattr(
        engine.vllm.input_processor, "process_inputs", refuse
    )  # no request of hwrl's is known to be refused
    (request,) = requests_of(1)
    with pytest.raises(EngineError, match=rf"vLLM refuses request {request.request_id}(.|\n)*the queue is full"):
        engine.submit([request])
    assert engine.pending() == 0


def test_what_fails_in_a_step_leaves_no_weights_and_a_whole_version_heals(engine: VllmEngine, policy: Policy) -> None:
    if isinstance(engine.core, ProcessCore):
        pytest.skip("its process ends with the error: the test of an engine of its own")
    (beyond,) = requests_of(1)
    beyond.prompt_ids[:] = 1_000_000
    engine.submit([*requests_of(2, new=20), beyond])
    with pytest.raises(EngineError, match=r"vLLM failed while generating; its 3 requests are dropped(.|\n)*IndexError"):
        engine.step()
    assert (engine.version, engine.pending()) == (-1, 0)
    engine.submit(requests_of(1))
    with pytest.raises(EngineError, match="the engine has no weights"):
        engine.step()
    engine.abort()
    engine.load_weights(policy.change().items(), version=next(_versions))
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


@pytest.mark.skipif(not ON_HOST, reason="on devices this error breaks the device's context")
def test_an_engine_whose_process_failed_in_a_step_tells_why_and_asks_for_a_new_one(
    model_directory: Path, policy: Policy
) -> None:
    engine = engine_of(model_directory, engine_core="process")
    engine.load_weights(policy.change().items(), version=1)
    (beyond,) = requests_of(1)
    beyond.prompt_ids[:] = 1_000_000
    engine.submit([beyond])
    with pytest.raises(EngineError, match=r"while generating(.|\n)*why: IndexError(.|\n)*fix: make a new engine"):
        engine.step()
    with pytest.raises(EngineError, match=r"version 2 was not loaded|finishing a step before an update"):
        engine.load_weights(policy.change().items(), version=2)
    engine.close()


# -- updates that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["missing", "unknown", "of another shape"])
def test_weights_of_another_model_are_refused_and_the_old_version_serves(
    engine: VllmEngine, policy: Policy, wrong: str
) -> None:
    served = engine.version
    weights = {name: torch.zeros_like(tensor) for name, tensor in policy.model.state_dict().items()}
    last = weights.pop("lm_head.weight")
    if wrong != "missing":
        weights["lm_head.weight"] = last if wrong == "unknown" else last[1:]
    if wrong == "unknown":
        weights["model.extra"] = last
    with pytest.raises(EngineError, match=rf"do not belong to this model(.|\n)*{wrong}: \['"):
        engine.load_weights(weights.items(), version=next(_versions))
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))
    assert engine.version == served


def test_a_corrupt_version_is_not_received_and_the_old_one_serves(engine: VllmEngine, policy: Policy) -> None:
    store = serve_store()
    other = {name: torch.full_like(tensor, 3.0) for name, tensor in policy.model.state_dict().items()}
    with (
        WeightSender(store, transport="host", timeout_s=100.0) as sender,
        WeightReceiver(store, replica="r0") as receiver,
    ):
        sender.publish(1, other.items())
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                if "hwrl-weights" in os.readlink(f"/proc/self/fd/{number}"):
                    os.pwrite(int(number), b"\x01", 0)
        with pytest.raises(TransferFailedError, match="bytes received differ from those written"):
            receiver.receive(timeout_s=slow(5.0))
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_weights_that_cannot_be_lent_to_a_worker_process_leave_the_version_before(
    engine: VllmEngine, policy: Policy
) -> None:
    if isinstance(engine.core, InlineCore):
        pytest.skip("the worker is in this process and reads the weights themselves")
    before = engine.version
    torn = policy.change()
    torn["model.norm.weight"] = torn["model.norm.weight"].to("meta")
    with pytest.raises(EngineError, match="version 699 was not loaded; the engine keeps the version before"):
        engine.load_weights(torn.items(), version=699)
    assert engine.version == before


def test_an_update_that_fails_in_the_middle_is_not_served_and_a_whole_one_heals(
    engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_on_device", lambda weights, name: weights)  # it would refuse them at once
    running = requests_of(2, new=20)
    engine.submit(running)
    engine.step()
    torn = policy.change()
    torn["model.layers.1.self_attn.k_proj.weight"] = torn["model.layers.1.self_attn.k_proj.weight"].to("meta")
    with pytest.raises(EngineError, match="version 700 was not loaded, and the version before is gone"):
        engine.load_weights(torn.items(), version=700)
    with pytest.raises(EngineError, match="requests are pending, but the engine has no weights"):
        engine.step()
    monkeypatch.undo()
    engine.load_weights(policy.change().items(), version=701)
    assert {701} < {version for response in finish(engine).values() for version in response.versions.tolist()}
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_weights_that_were_loaded_are_not_read_again(engine: VllmEngine, policy: Policy) -> None:
    weights = policy.change()
    engine.load_weights(weights.items(), version=next(_versions))
    for tensor in weights.values():
        tensor.fill_(7.0)
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_what_was_cached_before_a_sleep_is_not_read_after_it(
    engine: VllmEngine, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_settings", replace(engine._settings, free_cache_engine=True))
    for name in ("sleep", "wake"):  # as if vLLM kept what it has cached
        monkeypatch.setattr(engine.core, name, lambda argument: None)
    requests = requests_of(4, prompt=2 * BLOCK + 6)
    generate(engine, requests)
    engine.sleep(level=1)
    engine._load(engine._on_device(policy.change(), "another version"), None)  # it would show
    engine.wake()
    policy.check_greedy(requests, generate(engine, requests))


def test_the_process_holds_one_model_or_none_beside_vllms_process(
    engine: VllmEngine, policy: Policy, parameters_before: list[weakref.ref[torch.nn.Parameter]]
) -> None:
    before = {id(one) for ref in parameters_before if (one := ref()) is not None}
    held = [one for one in parameters() if id(one) not in before]
    held_nbytes = sum(one.nbytes for one in held)
    if isinstance(engine.core, ProcessCore):
        assert held_nbytes == 0
    else:
        assert 0 < held_nbytes < 1.5 * sum(one.nbytes for one in policy.model.parameters())


@pytest.mark.skipif(not ON_HOST, reason="on devices python -m hwrl_bench.vllm_updates checks such a model")
def test_a_head_that_shares_the_embeddings_weights_is_updated_with_them(model_directory: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(model_directory, tie_word_embeddings=True, vocab_size=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy, engine = Policy(tmp_path), engine_of(tmp_path, engine_core="inline")
    requests = requests_of(4)
    for version in range(4):
        weights = policy.change()
        if version % 2:  # a sender may give what is shared once
            weights.pop("lm_head.weight")
        engine.load_weights(weights.items(), version=version)
        policy.check_greedy(requests, generate(engine, requests))
    engine.close()


def test_an_engine_that_was_not_started_for_it_does_not_sleep(shared_engine: VllmEngine) -> None:
    for call in (lambda: shared_engine.sleep(level=1), shared_engine.wake):
        with pytest.raises(UnsupportedError, match=r"not started in vLLM's sleep mode(.|\n)*free_cache_engine"):
            call()


@pytest.mark.skipif(not ON_HOST, reason="on devices vLLM has sleep mode")
def test_sleep_is_refused_where_vllm_cannot(model_directory: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"cannot sleep(.|\n)*rollout\.free_cache_engine=false"):
        engine_of(model_directory, free_cache_engine=True)


def test_what_vllm_refuses_of_hwrls_own_is_answered_with_its_key(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len(.|\n)*correct data\.max_prompt_tokens or rollout\.max_new"):
        engine_of(model_directory, max_length=1 << 20)


def test_too_little_memory_for_the_cache_is_answered_with_its_key(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory(.|\n)*correct [\w. ]*rollout\.engine_options"):
        engine_of(model_directory, engine_core="process", kv_cache_memory_bytes=1 << 10)


def test_vllm_that_fails_at_its_start_in_another_way_is_told_of_with_its_error(
    model_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object, **options: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("vllm.v1.engine.llm_engine.LLMEngine.from_engine_args", fail)
    with pytest.raises(EngineError, match=r"vLLM does not start(.|\n)*RuntimeError: no such kernel"):
        engine_of(model_directory)


@pytest.mark.skipif(not ON_HOST and get_backend().device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("transports", ["device", pytest.param("host ipc device", marks=pytest.mark.extended)])
def test_two_workers_receive_20_versions_and_one_that_is_killed_in_the_middle_is_told_of(
    tmp_path: Path, transports: str, plain: bool
) -> None:
    write_model(tmp_path, "llama")  # each worker has rows of its vocabulary
    command = [sys.executable, "-m", "tests.plugins.vllm.tensor_parallel", str(tmp_path), *transports.split()]
    environ = {**os.environ, PLAIN: "1"} if plain else None
    ended = subprocess.run(command, cwd=REPO, text=True, capture_output=True, timeout=5000, check=False, env=environ)
    assert ended.returncode == 0, ended.stderr[-3000:]
