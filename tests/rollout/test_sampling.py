"""What the embedded engine samples: the filtered distribution, with its own log-probabilities, row by row."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.errors import EngineError
from hwrl.interfaces import GenerationRequest, Response, Sampling
from hwrl.rollout import EmbeddedEngine
from hwrl.rollout.sampling import SlotSampler, filter_logits
from hwrl.saved_names import saved_weights
from tests.support.filtered import FILTERS, distribution
from tests.support.tiny_model import END, generate, requests_of, tiny_model

PROMPT = np.array([5, 9], dtype=np.int32)


def engine_of(model: Any, **options: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, **{"eos_ids": [END], "max_running": 64, "max_length": 24, **options})
    weights, _ = saved_weights(model)
    engine.load_weights({name: tensor.clone() for name, tensor in weights.items()}.items(), version=0)
    return engine


def logits_of(model: Any, request: GenerationRequest, response: Response) -> np.ndarray:
    tokens = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits: np.ndarray = model.double()(tokens).logits[0, len(request.prompt_ids) - 1 : -1].numpy()
    return logits


@pytest.mark.parametrize("settings", FILTERS.values(), ids=FILTERS)
def test_tokens_come_as_often_as_the_filtered_distribution_says(settings: dict[str, Any]) -> None:
    model, count = tiny_model(), 4000
    sampling = Sampling(1, **settings)
    many = [GenerationRequest(index, PROMPT, sampling) for index in range(count)]
    responses = generate(engine_of(model, max_running=count, max_length=4, seed=3), many)
    seen = np.bincount([int(one.token_ids[0]) for one in responses.values()], minlength=16)
    wanted = distribution(logits_of(model, many[0], responses[0])[0], sampling)
    possible = wanted > 0
    assert not seen[~possible].any(), "dropped tokens are never sampled"
    expected = count * wanted[possible]
    chi_square = float(((seen[possible] - expected) ** 2 / expected).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom), f"{chi_square} with {freedom} degrees of freedom"


def test_log_probabilities_are_those_of_each_rows_own_distribution() -> None:
    model, rng = tiny_model(), np.random.default_rng(0)
    each = [Sampling(12, **settings) for settings in [*FILTERS.values(), {}, {"temperature": 0.6}]]
    requests = [
        GenerationRequest(number, rng.integers(2, 16, size=1 + number % 5).astype(np.int32), each[number % len(each)])
        for number in range(70)
    ]
    responses = generate(engine_of(model, max_running=9), requests)  # several fillings of each slot
    for request in requests:
        response = responses[request.request_id]
        for place, logits in enumerate(logits_of(model, request, response)):
            wanted = distribution(logits, request.sampling)[response.token_ids[place]]
            assert wanted > 0
            np.testing.assert_allclose(response.logprobs[place], np.log(wanted), rtol=1e-4, atol=1e-4)


def test_rows_without_filters_are_sampled_bit_for_bit_as_before_them() -> None:
    rows, vocabulary = 50, 300
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, vocabulary, generator=generator)
    draws = torch.rand(rows, 1, generator=generator)
    temperature = torch.tensor([0.0, 0.7, 1.0, 1.3, 1.0] * 10)
    greedy = temperature == 0
    logprobs = (logits / torch.where(greedy, 1.0, temperature)[:, None]).log_softmax(-1)
    sums = logprobs.exp().cumsum(-1)
    tokens = torch.where(greedy, logprobs.argmax(-1), (sums <= draws * sums[:, -1:]).sum(-1))[:, None]

    plain = [Sampling(1, float(one)) for one in temperature]
    mixed = [replace(one, top_p=0.5) if place % 5 == 4 else one for place, one in enumerate(plain)]
    for settings in (plain, mixed):
        sampler = SlotSampler(slots=rows, device=torch.device("cpu"))
        sampler.fill(slice(0, rows), settings)
        got, got_logprobs = sampler.sample(slice(0, rows), logits, draws)
        same = torch.tensor([not one.is_filtered for one in settings])
        assert torch.equal(got[same], tokens[same])
        assert torch.equal(got_logprobs[same], logprobs.gather(1, tokens)[same])


def test_equal_tokens_stay_together() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]])
    one = torch.ones(1)
    top_k = filter_logits(logits, top_p=one, top_k=torch.tensor([2]), min_p=0 * one)
    top_p = filter_logits(logits, top_p=0.5 * one, top_k=torch.tensor([6]), min_p=0 * one)
    for kept in (top_k, top_p):
        assert kept.isfinite().tolist() == [[False, True, True, True, True, False]]


def test_all_tokens_stay_without_top_p_however_small_their_share() -> None:
    logits = torch.linspace(0, -40, 50_000)[None]  # their shares add up to 1 long before the last one, in float32
    one = torch.ones(1)
    kept = filter_logits(logits, top_p=one, top_k=torch.tensor([49_000]), min_p=1e-30 * one)
    assert int(kept.isfinite().sum()) == 49_000


def test_a_draw_between_two_kept_tokens_takes_no_dropped_one() -> None:
    sampler = SlotSampler(slots=3, device=torch.device("cpu"))
    sampler.fill(slice(0, 3), [Sampling(1, top_k=2)] * 3)
    logits = torch.tensor([[-9.0, 1.0, -9.0, 1.0, -9.0]]).expand(3, 5)
    tokens, _ = sampler.sample(slice(0, 3), logits, torch.tensor([[0.0], [0.5], [1 - 2**-24]]))
    assert tokens[:, 0].tolist() == [1, 3, 3]


def test_a_request_with_a_seed_gives_the_same_tokens_whatever_runs_beside() -> None:
    model = tiny_model()
    sampling = Sampling(20, top_p=0.9, seed=7)
    responses = []
    for others, number in ((0, 3), (9, 800)):
        beside = [replace(one, request_id=one.request_id + 1000) for one in requests_of(others, temperature=1.0)]
        seeded = GenerationRequest(number, PROMPT, sampling)
        responses.append(generate(engine_of(model, eos_ids=[], seed=others, max_running=4), [*beside, seeded])[number])
    assert responses[0].token_ids.tolist() == responses[1].token_ids.tolist()
    np.testing.assert_allclose(responses[0].logprobs, responses[1].logprobs, rtol=1e-4)
    other = generate(engine_of(model, eos_ids=[]), [GenerationRequest(3, PROMPT, replace(sampling, seed=8))])[3]
    assert other.token_ids.tolist() != responses[0].token_ids.tolist()


def letters(token_ids: Any) -> str:
    return "".join(chr(ord("a") + int(token)) for token in token_ids)


def test_a_stop_text_ends_a_response_with_the_token_that_completes_it() -> None:
    model = tiny_model()
    plain = [GenerationRequest(number, PROMPT, Sampling(20)) for number in range(30)]
    whole = generate(engine_of(model, eos_ids=[], max_running=8, decode=letters), plain)
    text = letters(whole[0].token_ids)[4:6]
    stopping = [replace(one, sampling=Sampling(20, stop=("never", text))) for one in plain[::2]]
    mixed = [*stopping, *plain[1::2]]
    responses = generate(engine_of(model, eos_ids=[], max_running=8, decode=letters), mixed)
    for request in plain:
        full, response = whole[request.request_id], responses[request.request_id]
        found = letters(full.token_ids).find(text) if request.request_id % 2 == 0 else -1
        length = found + 2 if found >= 0 else 20
        assert response.token_ids.tolist() == full.token_ids[:length].tolist()
        np.testing.assert_allclose(response.logprobs, full.logprobs[:length], rtol=1e-4)
        assert (response.stop, response.truncated) == ((text, False) if found >= 0 else (None, True))
    assert sum(response.stop is not None for response in responses.values()) > 1


def test_a_stop_token_ends_a_response_and_stays_in_it() -> None:
    engine = engine_of(tiny_model())
    requests = [GenerationRequest(number, PROMPT, Sampling(20, stop_token_ids=(4, 6))) for number in range(30)]
    ends = set()
    for response in generate(engine, requests).values():
        assert not set(response.token_ids[:-1].tolist()) & {4, 6, END}
        end = int(response.token_ids[-1])
        ends.add(end if not response.truncated else None)
        assert response.stop == (end if end in (4, 6) else None)
        assert response.truncated == (end not in (4, 6, END))
    assert ends >= {4, 6, END}


def test_stop_texts_without_a_tokenizer_are_refused() -> None:
    engine = engine_of(tiny_model())
    with pytest.raises(EngineError, match=r"request 1 has stop texts(.|\n)*make the engine with decode"):
        engine.submit([GenerationRequest(1, PROMPT, Sampling(3, stop=("x",)))])
    assert engine.pending() == 0


@pytest.mark.parametrize(
    "wrong",
    [
        *({"temperature": 1e-46}, {"temperature": 1e-3}, {"temperature": math.nan}, {"temperature": 101.0}),
        *({"top_p": 0.0}, {"top_p": 1.1}, {"top_k": 0}, {"top_k": 1 << 31}, {"min_p": -0.1}),
        *({"stop": "text"}, {"stop": ("",)}, {"stop_token_ids": (-1,)}, {"stop_token_ids": (1 << 31,)}, {"seed": -1}),
    ],
    ids=str,
)
def test_a_setting_out_of_its_range_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))}="):
        Sampling(1, **wrong)
