"""Rows in ranges by length: short rows do not read as many positions as long ones, and no result changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hwrl.errors import EngineError
from hwrl.interfaces import GenerationRequest, Response, Sampling
from hwrl.rollout import EmbeddedEngine
from hwrl.rollout.row_ranges import RowDivider, RowDivision, RowRange
from hwrl.saved_names import saved_weights
from tests.support.tiny_model import generate, tiny_model

SHORT, LONG = 400, 5


@contextmanager
def seen_attention() -> Iterator[list[tuple[int, int]]]:
    """Yield a list that gets the rows and the positions of each attention from one token."""
    from transformers import AttentionInterface

    real: Any = AttentionInterface()["sdpa"]
    seen: list[tuple[int, int]] = []

    def attend(module: Any, query: torch.Tensor, key: torch.Tensor, *rest: Any, **kwargs: Any) -> Any:
        if query.shape[2] == 1:
            seen.append((key.shape[0], key.shape[2]))
        return real(module, query, key, *rest, **kwargs)

    AttentionInterface.register("sdpa", attend)
    try:
        yield seen
    finally:
        AttentionInterface.register("sdpa", real)


def engine_of(model: Any) -> EmbeddedEngine:
    engine = EmbeddedEngine(model, eos_ids=[], max_running=SHORT + LONG, max_length=80)
    engine.load_weights(list(saved_weights(model)[0].items()), version=0)
    return engine


def mixed_requests() -> list[GenerationRequest]:
    rng = np.random.default_rng(0)
    lengths = [60 if index % 81 == 40 else int(rng.integers(2, 6)) for index in range(SHORT + LONG)]
    return [
        GenerationRequest(index, rng.integers(2, 16, size=length).astype(np.int32), Sampling(6, temperature=0.0))
        for index, length in enumerate(lengths)
    ]


def next_logits(model: Any, request: GenerationRequest, response: Response) -> torch.Tensor:
    """Return the logits before each token of ``response``, from one pass of the model over all tokens."""
    tokens = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits: torch.Tensor = model(tokens).logits[0, len(request.prompt_ids) - 1 : -1]
    return logits


@pytest.mark.parametrize("experts", [0, 4])
def test_short_rows_read_few_positions_beside_long_ones(experts: int) -> None:
    model, requests = tiny_model(experts=experts), mixed_requests()
    with seen_attention() as seen:
        together = generate(engine_of(model), requests)
    assert {rows for rows, _ in seen} == {SHORT, LONG}
    assert max(positions for rows, positions in seen if rows == SHORT) < 12
    assert model.config._attn_implementation == "sdpa"
    for request in requests[:45]:
        response = together[request.request_id]
        logits = next_logits(model, request, response)
        assert response.token_ids.tolist() == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).max(-1).values  # at temperature 0: those of the policy
        np.testing.assert_allclose(response.logprobs, wanted.numpy(), atol=1e-4)


@contextmanager
def seen_divisions() -> Iterator[list[RowDivision]]:
    """Yield a list that gets each division of a step."""
    divide, seen = RowDivider.divide, list[RowDivision]()

    def seen_divide(divider: RowDivider, lengths: Any, *, position_nbytes: int) -> RowDivision:
        seen.append(divide(divider, lengths, position_nbytes=position_nbytes))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowDivider, "divide", seen_divide)
        yield seen


def test_a_moved_request_keeps_its_settings_its_random_numbers_and_its_versions() -> None:
    model, requests = tiny_model(), mixed_requests()
    kinds = [Sampling(6), Sampling(6, top_k=1), Sampling(3, temperature=0.5), Sampling(6, stop_token_ids=(3, 5, 7, 9))]
    requests = [replace(one, sampling=kinds[one.request_id // 3 % 4]) for one in requests]
    engine, together = engine_of(model), dict[int, Response]()
    with seen_divisions() as divisions:
        engine.submit(requests)
        for version in range(1, 7):
            together |= {done.request_id: done.response for done in engine.step()}
            engine.load_weights(list(saved_weights(model)[0].items()), version=version)
    assert not engine.pending() and len(divisions[0].sources) == 2 * LONG
    for request in [one for one in requests if one.request_id < 12 or one.request_id % 81 == 40]:
        response, alone = together[request.request_id], generate(engine_of(model), [request])[request.request_id]
        assert response.token_ids.tolist() == alone.token_ids.tolist() and response.stop == alone.stop
        assert response.versions.tolist() == list(range(len(response.token_ids)))


def test_a_model_with_code_of_its_own_for_attention_is_not_divided() -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model("falcon", vocab_size=16, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    config.initializer_range = 0.3
    model, requests = AutoModelForCausalLM.from_config(config).eval(), mixed_requests()
    with seen_divisions() as divisions:
        together = generate(engine_of(model), requests)
    assert not divisions, "so no row was moved"
    for request in [one for one in requests if one.request_id % 81 in (40, 41)][:4]:
        wanted = next_logits(model, request, together[request.request_id]).log_softmax(-1).max(-1).values
        np.testing.assert_allclose(together[request.request_id].logprobs, wanted.numpy(), atol=1e-4)


def test_a_model_with_another_attention_is_refused() -> None:
    model = tiny_model()
    model.set_attn_implementation("flex_attention")
    with pytest.raises(EngineError, match="its attention is flex_attention, and the engine makes masks for sdpa and"):
        engine_of(model)


def divide(lengths: list[int], *, position_nbytes: int = 1024, launched: bool = False) -> RowDivision:
    return RowDivider(launched=launched).divide(np.array(lengths), position_nbytes=position_nbytes)


def moved(lengths: list[int], division: RowDivision) -> list[int]:
    """Return ``lengths`` in the order after the moves of ``division``."""
    after = list(lengths)
    for source, target in zip(division.sources, division.targets, strict=True):
        after[target] = lengths[source]
    return after


def test_rows_are_divided_where_that_reads_the_fewest_bytes() -> None:
    lengths, divider = [10] * 150 + [900] + [12] * 149 + [1000] + [300] * 40, RowDivider(launched=False)
    before = divider.divide(np.array(lengths), position_nbytes=1024)
    assert before == RowDivision([RowRange(slice(0, 301), 1000), RowRange(slice(301, 341), 300)])
    division = divider.divide(np.array(lengths), position_nbytes=1024)
    assert division.ranges == [RowRange(slice(0, 2), 1000), RowRange(slice(2, 42), 300), RowRange(slice(42, 341), 12)]
    assert len(division.sources) == 84, "42 longer rows change places with 42 short ones"
    assert divide(moved(lengths, division)) == RowDivision(division.ranges), "now each row is in its range"


@settings(max_examples=300)
@given(
    lengths=st.lists(st.sampled_from([5, 6, 7, 40, 41, 200, 900, 901, 4000, 9000]), min_size=1, max_size=200),
    position_nbytes=st.sampled_from([0, 64, 1024, 1 << 16]),
)
def test_moves_lose_no_row_and_every_range_holds_its_rows(lengths: list[int], position_nbytes: int) -> None:
    division = divide(lengths, position_nbytes=position_nbytes)
    after, ranges = moved(lengths, division), division.ranges
    assert sorted(after) == sorted(lengths) and sorted(division.sources) == sorted(division.targets)
    assert [place for one in ranges for place in range(one.rows.start, one.rows.stop)] == list(range(len(lengths)))
    assert all(max(after[one.rows]) <= one.positions <= ranges[0].positions for one in ranges)
    assert ranges[0].positions == max(lengths) and len(ranges) <= 4


@pytest.mark.parametrize(
    ("lengths", "position_nbytes", "launched"),
    [
        ([7] * 512, 1 << 20, False),  # no row is longer
        ([50] + [8] * 100, 128, False),  # saves half a MiB
        ([500] * 8 + [8] * 256, 1024, True),  # saves 123 MiB, less than the launches take
        ([500] * 8 + [8], 1 << 10, False),  # only one is short
    ],
)
def test_rows_are_not_divided_for_less_than_the_added_operations(
    lengths: list[int], position_nbytes: int, launched: bool
) -> None:
    whole = RowDivision([RowRange(slice(0, len(lengths)), max(lengths))])
    for order in (lengths, lengths[::-1]):
        assert divide(order, position_nbytes=position_nbytes, launched=launched) == whole


@pytest.mark.parametrize(("short", "steps"), [(400, 0), (4, 8)])
def test_rows_move_once_their_order_has_cost_as_much_as_the_move(short: int, steps: int) -> None:
    """Moving four long rows to the front costs 3,200 reads; each step before it wastes 92 for each short row."""
    lengths, divider = np.array([8] * short + [100] * 4), RowDivider(launched=False)
    for _ in range(steps):
        assert not divider.divide(lengths, position_nbytes=1 << 20).sources
    assert len(divider.divide(lengths, position_nbytes=1 << 20).sources) == 8
