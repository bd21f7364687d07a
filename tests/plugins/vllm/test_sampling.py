"""Real vLLM's filters, stops and seeds: its log-probabilities are of the distribution that it samples from."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hwrl.interfaces import Sampling
from hwrl.models import load_tokenizer
from hwrl_vllm.engine import VllmEngine
from tests.plugins.vllm.serving import CLOSE, END, LONGEST, Policy, engine_of, generate, requests_of
from tests.support.filtered import FILTERS, distribution

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
    pytest.mark.filterwarnings("default"),  # vLLM warns of its own use of what is deprecated
]


@pytest.fixture(scope="module")
def engine(policy: Policy, model_directory: Path) -> Iterator[VllmEngine]:
    # The sampling of most requests changes none that has another.
    engine = engine_of(model_directory, sampling={"top_p": 0.9, "stop": ("never",)}, max_num_batched_tokens=LONGEST)
    engine.load_weights(policy.change().items(), version=0)
    yield engine
    engine.close()


def test_log_probabilities_are_those_of_each_requests_own_distribution(engine: VllmEngine, policy: Policy) -> None:
    each = [Sampling(12, **settings) for settings in [*FILTERS.values(), {}, {"temperature": 0.0, "top_k": 3}]]
    requests = [replace(one, sampling=each[index % len(each)]) for index, one in enumerate(requests_of(42))]
    responses = generate(engine, requests)
    narrower = 0
    for request in requests:
        response, sampling = responses[request.request_id], request.sampling
        if sampling.temperature == 0:
            policy.check_greedy([request], responses)
            continue
        for place, logits in enumerate(policy.logits(request.prompt_ids, response).numpy()):
            wanted = distribution(logits, sampling)
            narrower += bool((wanted == 0).any())
            chosen = wanted[response.token_ids[place]]
            np.testing.assert_allclose(response.logprobs[place], np.log(chosen), rtol=CLOSE, atol=CLOSE)
    assert narrower > 100


def test_tokens_come_as_often_as_the_filtered_distribution_says(engine: VllmEngine, policy: Policy) -> None:
    count, first = 1500, requests_of(1)[0]
    sampling = Sampling(1, temperature=1.5, top_p=0.8, min_p=0.02)
    responses = generate(engine, [replace(first, request_id=-1 - n, sampling=sampling) for n in range(count)])
    (logits,) = policy.logits(first.prompt_ids, responses[-1]).numpy()
    wanted = distribution(logits, sampling)
    seen = np.bincount([int(one.token_ids[0]) for one in responses.values()], minlength=len(wanted))
    possible = wanted > 0
    assert 1 < possible.sum() < len(wanted) and not seen[~possible].any()
    expected, freedom = count * wanted[possible], int(possible.sum()) - 1
    chi_square = float(((seen[possible] - expected) ** 2 / expected).sum())
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"


def test_a_request_with_a_seed_gives_the_same_tokens_whatever_runs_beside(engine: VllmEngine) -> None:
    (first,) = requests_of(1)
    seeded = replace(first, sampling=Sampling(40, top_p=0.9, seed=7))
    alone = generate(engine, [seeded])[seeded.request_id]
    beside = generate(engine, [*requests_of(9, temperature=1.0, new=30), seeded])[seeded.request_id]
    assert alone.token_ids.tolist() == beside.token_ids.tolist()


def test_stops_end_a_response_where_they_are_complete(engine: VllmEngine, model_directory: Path) -> None:
    decode = load_tokenizer(model_directory).decode
    plain = [
        replace(one, sampling=Sampling(40, temperature=2.0, seed=number)) for number, one in enumerate(requests_of(24))
    ]
    whole = generate(engine, plain)
    longest = max(whole.values(), key=lambda response: len(response.token_ids))
    stop, token = decode(longest.token_ids[4:6]), int(longest.token_ids[2])
    stopping = [replace(one, sampling=replace(one.sampling, stop=("zzz", stop))) for one in plain[::2]]
    tokens = [replace(one, sampling=replace(one.sampling, stop_token_ids=(token,))) for one in plain[1::2]]
    responses = generate(engine, [*stopping, *tokens])
    assert engine.pending() == 0
    for request in [*stopping, *tokens]:
        full, response = whole[request.request_id].token_ids.tolist(), responses[request.request_id]
        ends = [
            count
            for count in range(1, len(full) + 1)
            if (stop in decode(full[:count]) if request.sampling.stop else full[count - 1] == token)
        ]
        length = min([*ends, len(full)])
        assert response.token_ids.tolist() == full[:length]
        assert len(response.logprobs) == len(response.versions) == length
        assert response.stop == ((stop if request.sampling.stop else token) if ends else None)
        assert response.truncated == (not ends and full[-1] != END)
    assert {type(response.stop) for response in responses.values()} == {str, int, type(None)}


def test_a_long_prompt_beside_others_may_have_a_seed(engine: VllmEngine) -> None:
    (first,) = requests_of(1, prompt=LONGEST - 4)
    seeded = replace(first, sampling=Sampling(4, seed=3))
    beside = requests_of(15, prompt=LONGEST // 3, temperature=1.0)  # they leave no room for the whole prompt in a step
    alone = generate(engine, [seeded])[seeded.request_id]
    assert generate(engine, [*beside, seeded])[seeded.request_id].token_ids.tolist() == alone.token_ids.tolist()
