"""A few long rows among many short ones: the short rows do not read as many positions, and no result changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from hwrl.interfaces import GenerationRequest, Sampling
from hwrl.rollout import EmbeddedEngine
from hwrl.rollout.long_rows import find_long_rows
from hwrl.saved_names import saved_weights
from tests.support.tiny_model import generate, tiny_model

CPU = torch.device("cpu")
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
    assert {rows for rows, _ in seen} == {SHORT + LONG, LONG}
    assert max(positions for rows, positions in seen if rows == SHORT + LONG) < 12
    assert model.config._attn_implementation == "sdpa"
    for request in requests[:45]:
        response = together[request.request_id]
        tokens = torch.from_numpy(np.concatenate([request.prompt_ids, response.token_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = model(tokens).logits[0, len(request.prompt_ids) - 1 : -1]
        assert response.token_ids.tolist() == logits.argmax(-1).tolist()
        wanted = logits.log_softmax(-1).max(-1).values  # at temperature 0: those of the policy
        np.testing.assert_allclose(response.logprobs, wanted.numpy(), atol=1e-5)


def test_rows_are_divided_where_that_reads_the_fewest_bytes() -> None:
    lengths = np.array([10] * 50 + [900] + [12] * 49 + [1000])
    found = find_long_rows(lengths, position_nbytes=1024, launched=False, device=CPU)
    assert found is not None
    assert (found.short, sorted(found.long.tolist())) == (12, [50, 100])


@pytest.mark.parametrize(
    ("lengths", "position_nbytes", "launched"),
    [
        ([7] * 512, 1 << 20, False),  # no row is longer
        ([8] * 100 + [50], 128, False),  # saves half a MiB
        ([8] * 256 + [500] * 8, 1024, True),  # saves 111 MiB, less than the launches take
        ([500] * 8 + [8], 1 << 20, False),  # all but one are long
    ],
)
def test_rows_are_not_divided_for_less_than_the_added_operations(
    lengths: list[int], position_nbytes: int, launched: bool
) -> None:
    found = find_long_rows(np.array(lengths), position_nbytes=position_nbytes, launched=launched, device=CPU)
    assert found is None
