"""A few long rows among many short ones: the short rows do not read as many positions, and no result changes."""

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

from hwrl.interfaces import GenerationRequest, Sampling
from hwrl.rollout import EmbeddedEngine
from hwrl.rollout.row_ranges import RowMoves, RowRange, RowRanges
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
        tokens = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.prompt_ids) - 1 : -1]
        assert response.token_ids.tolist() == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).max(-1).values  # at temperature 0: those of the policy
        np.testing.assert_allclose(response.logprobs, wanted.numpy(), atol=1e-5)


def test_a_moved_request_keeps_its_settings_and_its_random_numbers() -> None:
    model, requests = tiny_model(), mixed_requests()
    kinds = [Sampling(6), Sampling(6, top_k=1), Sampling(3, temperature=0.5), Sampling(6, top_p=0.4)]
    requests = [replace(one, sampling=kinds[one.request_id // 3 % 4]) for one in requests]
    find, found = RowRanges.find_moves, list[RowMoves]()

    def seen_moves(ranges: RowRanges, lengths: Any) -> RowMoves | None:
        moves = find(ranges, lengths)
        found.extend([] if moves is None else [moves])
        return moves

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowRanges, "find_moves", seen_moves)
        together = generate(engine_of(model), requests)
    assert found and len(found[0].sources) == 2 * LONG
    for request in [one for one in requests if one.request_id < 6 or one.request_id % 81 == 40]:
        alone = generate(engine_of(model), [request])[request.request_id]
        assert together[request.request_id].token_ids.tolist() == alone.token_ids.tolist()


def ranges_of(position_nbytes: int = 1024, *, launched: bool = False) -> RowRanges:
    return RowRanges(position_nbytes=position_nbytes, launched=launched)


def moved(lengths: list[int], moves: RowMoves | None) -> list[int]:
    """Return ``lengths`` in the order after ``moves``."""
    after = list(lengths)
    if moves is not None:
        for source, target in zip(moves.sources, moves.targets, strict=True):
            after[target] = lengths[source]
    return after


def test_rows_are_divided_where_that_reads_the_fewest_bytes() -> None:
    lengths = [10] * 50 + [900] + [12] * 49 + [1000] + [300] * 40
    moves = ranges_of().find_moves(np.array(lengths))
    assert moves is not None and len(moves.sources) == 84, "42 longer rows change places with 42 short ones"
    after = moved(lengths, moves)
    found = ranges_of().find_ranges(np.array(after))
    assert found == [RowRange(slice(0, 2), 1000), RowRange(slice(2, 42), 300), RowRange(slice(42, 141), 12)]
    assert ranges_of().find_moves(np.array(after)) is None, "now each row is in its range"


@settings(max_examples=300, deadline=None)
@given(
    lengths=st.lists(st.sampled_from([5, 6, 7, 40, 41, 200, 900, 901]), min_size=1, max_size=200),
    position_nbytes=st.sampled_from([64, 1024, 1 << 16]),
)
def test_moves_lose_no_row_and_every_range_holds_its_rows(lengths: list[int], position_nbytes: int) -> None:
    ranges = ranges_of(position_nbytes)
    moves = ranges.find_moves(np.array(lengths))
    after = moved(lengths, moves)
    assert sorted(after) == sorted(lengths)
    if moves is not None:
        assert sorted(moves.sources) == sorted(moves.targets)
    found = ranges.find_ranges(np.array(after))
    assert [place for one in found for place in range(one.rows.start, one.rows.stop)] == list(range(len(lengths)))
    assert all(max(after[one.rows]) <= one.positions <= max(lengths) for one in found)
    assert found[0].positions == max(lengths)


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
    ranges = ranges_of(position_nbytes, launched=launched)
    for order in (lengths, lengths[::-1]):
        assert ranges.find_moves(np.array(order)) is None
        assert len(ranges.find_ranges(np.array(order))) == 1


def test_rows_are_not_moved_for_less_than_a_move_takes() -> None:
    few, many = [100] * 4 + [8] * 4, [100] * 4 + [8] * 400
    for lengths, moves in ((few, 0), (many, 8)):
        found = ranges_of(1 << 20).find_moves(np.array(lengths[::-1]))
        assert len(found.sources if found else []) == moves
