"""Real vLLM on the host, beside transformers: tokens, log-probabilities, versions, and updates that fail."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hwrl.comm import serve_store
from hwrl.errors import EngineError, TransferFailedError
from hwrl.registry import get_backend
from hwrl.rollout.engine import GenerationRequest, RolloutEngine, RolloutSettings, Sampling
from hwrl.rollout.groups import Response
from hwrl.run.demo import write_demo
from hwrl.weights import WeightReceiver, WeightSender

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM warns of its own use of what is deprecated
    pytest.mark.timeout(600),  # the first call compiles
]

END, BLOCK, LONGEST = 1, 32, 128
Weights = dict[str, torch.Tensor]
_versions, _request_ids = itertools.count(), itertools.count()


class Policy:
    """transformers' model, whose random weights the engine is to serve."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def change(self) -> Weights:
        """Take other weights, and return them; far from uniform, so that a wrong one changes the greedy tokens."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def logits(self, prompt_ids: Any, response: Response) -> torch.Tensor:
        """Return those of the response's places, in one forward pass."""
        tokens = torch.from_numpy(np.concatenate([prompt_ids, response.token_ids]).astype(np.int64))
        with torch.no_grad():
            return self.model(tokens[None]).logits[0, len(prompt_ids) - 1 : -1]  # type: ignore[no-any-return] # not followed

    def logprobs(self, prompt_ids: Any, response: Response, *, temperature: float) -> Any:
        logprobs = (self.logits(prompt_ids, response) / temperature).log_softmax(-1)
        return logprobs.gather(1, torch.from_numpy(response.token_ids.astype(np.int64))[:, None])[:, 0].numpy()

    def check_greedy(self, requests: Sequence[GenerationRequest], responses: dict[int, Response]) -> None:
        for request in requests:
            response = responses[request.request_id]
            assert response.token_ids.tolist() == self.logits(request.prompt_ids, response).argmax(-1).tolist()
            wanted = self.logprobs(request.prompt_ids, response, temperature=1.0)
            np.testing.assert_allclose(response.logprobs, wanted, atol=1e-4)


@pytest.fixture(scope="module")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's configuration, without weights: the engine has none but those that it is sent."""
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory, seed=1, prompts=16)
    return directory / "model"


@pytest.fixture(scope="module")
def policy(model_directory: Path) -> Policy:
    torch.manual_seed(0)
    return Policy(model_directory)


@pytest.fixture(scope="module")
def shared_engine(policy: Policy, model_directory: Path) -> Iterator[RolloutEngine]:
    from hwrl_vllm import hwrl_rollout_engine

    for checkpoint in model_directory.glob("*.safetensors"):  # a rollout process reads none
        checkpoint.unlink()
    settings = RolloutSettings(
        model_directory=model_directory, dtype=torch.float32, eos_ids=[END], max_running=16, max_length=LONGEST
    )
    options = {"kv_cache_memory_bytes": 64 << 20, "enforce_eager": True, "block_size": BLOCK}
    engine = hwrl_rollout_engine(settings, options, get_backend())
    yield engine
    engine.close()


@pytest.fixture
def engine(shared_engine: RolloutEngine, policy: Policy) -> Iterator[RolloutEngine]:
    """The engine with weights that ``policy`` has, too."""
    shared_engine.load_weights(policy.change().items(), version=next(_versions))
    yield shared_engine
    shared_engine.abort()


def requests_of(count: int, *, temperature: float = 0.0, prompt: int = 6, new: int = 12) -> list[GenerationRequest]:
    rng = np.random.default_rng(prompt)
    return [
        GenerationRequest(
            next(_request_ids), rng.integers(2, 16, size=prompt).astype(np.int32), Sampling(new, temperature)
        )
        for _ in range(count)
    ]


def finish(engine: RolloutEngine) -> dict[int, Response]:
    responses = {}
    while engine.pending():
        responses.update({done.request_id: done.response for done in engine.step()})
    return responses


def generate(engine: RolloutEngine, requests: Sequence[GenerationRequest]) -> dict[int, Response]:
    engine.submit(requests)
    return finish(engine)


def test_greedy_tokens_equal_transformers_after_each_of_20_updates_through_the_weight_link(
    engine: RolloutEngine, policy: Policy
) -> None:
    requests = requests_of(4)
    store = serve_store()
    with WeightSender(store, timeout_s=60.0) as sender, WeightReceiver(store, replica="r0") as receiver:
        for version in range(100, 120):
            weights = policy.change()
            sending = threading.Thread(target=sender.publish, args=(version, weights.items()))
            sending.start()
            received = receiver.receive()
            sending.join()
            engine.load_weights(received.items(), version=received.version)
            responses = generate(engine, requests)
            policy.check_greedy(requests, responses)
            assert all(set(response.versions.tolist()) == {version} for response in responses.values())


def test_logprobs_are_those_of_the_policy_at_the_sampling_temperature(engine: RolloutEngine, policy: Policy) -> None:
    sampled, greedy = requests_of(12, temperature=0.7), requests_of(4)
    responses = generate(engine, [*sampled, *greedy])
    for request in sampled:
        response = responses[request.request_id]
        wanted = policy.logprobs(request.prompt_ids, response, temperature=0.7)
        np.testing.assert_allclose(response.logprobs, wanted, atol=1e-4)
    policy.check_greedy(greedy, responses)


def test_a_response_ends_with_an_end_token_or_is_truncated(engine: RolloutEngine) -> None:
    responses = generate(engine, requests_of(64, temperature=1.0, new=8))
    ended = [response for response in responses.values() if response.token_ids[-1] == END]
    assert ended and len(ended) < len(responses)
    for response in responses.values():
        assert END not in response.token_ids[:-1]
        assert response.truncated == (response.token_ids[-1] != END)
        assert len(response.token_ids) == 8 or not response.truncated


def test_a_request_goes_on_across_an_update_and_others_read_nothing_of_before(
    engine: RolloutEngine, policy: Policy
) -> None:
    (first,), old = requests_of(1, prompt=2 * BLOCK + 6, new=20), engine.version
    engine.submit([first])
    engine.step()
    engine.step()
    others = [GenerationRequest(next(_request_ids), first.prompt_ids, Sampling(20, 0.0)) for _ in range(2)]
    engine.submit(others[:1])  # waits while the weights change
    new = next(_versions)
    engine.load_weights(policy.change().items(), version=new)
    engine.submit(others[1:])
    responses = finish(engine)
    versions = responses[first.request_id].versions.tolist()
    assert versions == [old] * 2 + [new] * (len(versions) - 2) and versions[-1] == new
    policy.check_greedy(others, responses)
    assert {version for other in others for version in responses[other.request_id].versions.tolist()} == {new}


def test_aborted_requests_leave_room(engine: RolloutEngine, policy: Policy) -> None:
    engine.submit(requests_of(16, new=100))
    assert engine.capacity() == 0
    engine.step()
    running = engine.pending()
    assert running > 0 and (engine.capacity(), engine.abort()) == (16 - running, running)
    assert (engine.pending(), engine.capacity()) == (0, 16)
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_what_does_not_fit_is_refused_and_nothing_of_it_is_taken(engine: RolloutEngine) -> None:
    with pytest.raises(EngineError, match=f"together at most {LONGEST} fit"):
        engine.submit([*requests_of(1), *requests_of(1, new=LONGEST)])
    assert engine.pending() == 0


# -- updates that fail ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", ["missing", "unknown", "of another shape"])
def test_weights_of_another_model_are_refused_and_the_old_version_serves(
    engine: RolloutEngine, policy: Policy, wrong: str
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


def test_a_corrupt_version_is_not_received_and_the_old_one_serves(
    engine: RolloutEngine, policy: Policy, tmp_path: Path
) -> None:
    store = serve_store()
    other = {name: torch.full_like(tensor, 3.0) for name, tensor in policy.model.state_dict().items()}
    with (
        WeightSender(store, transport="host", directory=tmp_path, timeout_s=10.0) as sender,
        WeightReceiver(store, replica="r0") as receiver,
    ):
        sender.publish(1, other.items())
        for place in tmp_path.glob("*/[0-9]*"):
            with place.open("r+b") as file:
                file.write(b"\x01")
        with pytest.raises(TransferFailedError, match="other bytes came than were written"):
            receiver.receive(timeout_s=5.0)
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_an_update_that_fails_in_the_middle_is_not_served_and_a_whole_one_heals(
    engine: RolloutEngine, policy: Policy
) -> None:
    running = requests_of(2, new=20)
    engine.submit(running)
    engine.step()
    torn = policy.change()
    torn["model.layers.1.self_attn.k_proj.weight"] = torn["model.layers.1.self_attn.k_proj.weight"].to("meta")
    with pytest.raises(EngineError, match="version 700 was not loaded, and the version before is gone"):
        engine.load_weights(torn.items(), version=700)
    with pytest.raises(EngineError, match="2 requests are pending, but the engine has no weights"):
        engine.step()
    engine.load_weights(policy.change().items(), version=701)
    assert {701} < {version for response in finish(engine).values() for version in response.versions.tolist()}
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_weights_that_were_loaded_are_not_read_again(engine: RolloutEngine, policy: Policy) -> None:
    weights = policy.change()
    engine.load_weights(weights.items(), version=next(_versions))
    for tensor in weights.values():
        tensor.fill_(7.0)
    requests = requests_of(3)
    policy.check_greedy(requests, generate(engine, requests))


def test_the_process_holds_one_model(engine: RolloutEngine, policy: Policy) -> None:
    theirs = {id(parameter) for parameter in policy.model.parameters()}
    gc.unfreeze()  # vLLM hides what it holds from the collector
    found = {id(one): one for one in gc.get_objects() if issubclass(type(one), torch.nn.Parameter)}
    held = [one for key, one in found.items() if key not in theirs and one.device.type != "meta"]
    assert 0 < sum(one.nbytes for one in held) <= sum(one.nbytes for one in policy.model.parameters())
