"""The plan of packs and what a pack holds."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from hwrl.interfaces import Batch
from hwrl.train.packing import MicroBatch, make_pack, make_rows, plan_packs, rounded

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(0, 60), max_size=40)


def tokens_in(plan: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[row] for row in pack) for pack in plan]


@given(lengths=LENGTHS, max_tokens=st.integers(1, 100), packs=st.integers(0, 12))
def test_each_row_is_in_one_pack_and_no_pack_is_over_the_limit(lengths: list[int], max_tokens: int, packs: int) -> None:
    plan = plan_packs(lengths, max_tokens=max_tokens, packs=packs)
    assert sorted(row for pack in plan for row in pack) == [row for row, length in enumerate(lengths) if length]
    for pack, tokens in zip(plan, tokens_in(plan, lengths), strict=True):
        assert tokens <= max_tokens or len(pack) == 1
    assert len(plan) == max(packs, len(plan_packs(lengths, max_tokens=max_tokens)))


@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=9), packs=st.integers(1, 5))
def test_the_largest_pack_is_the_smallest_possible_of_sorted_rows(lengths: list[int], packs: int) -> None:
    plan = plan_packs(lengths, max_tokens=10_000, packs=packs)
    found = [[lengths[row] for row in pack] for pack in plan]
    order = sorted(lengths, reverse=True)
    assert [length for pack in found for length in pack] == order
    cuts = itertools.combinations(range(1, len(order)), min(packs, len(order)) - 1)
    parts = ([order[a:b] for a, b in itertools.pairwise([0, *cut, len(order)])] for cut in cuts)
    assert max(map(sum, found)) == min(max(map(sum, part)) for part in parts)


@given(count=st.integers(1, 10**6), bits=st.integers(2, 8))
def test_a_rounded_number_is_a_little_larger_and_one_of_few(count: int, bits: int) -> None:
    larger = rounded(count, bits=bits)
    assert count <= larger <= count * (1 + 2.0 ** (1 - bits))
    assert rounded(larger, bits=bits) == larger


def test_as_few_packs_as_the_limit_allows() -> None:
    assert tokens_in(plan_packs([5, 5, 5, 5], max_tokens=10), [5, 5, 5, 5]) == [10, 10]
    assert sorted(map(len, plan_packs([6, 6, 6, 30], max_tokens=10))) == [1, 1, 1, 1]


def batch_with(lengths: list[int], *, prompt: int = 2) -> Batch:
    """Return rows of ``lengths`` with distinct tokens; a row no longer than the prompt has no response."""
    places = torch.arange(max(lengths))
    tokens = torch.arange(len(lengths))[:, None] * 100 + places
    mask = (places >= prompt) & (places < torch.tensor(lengths)[:, None])
    numbers = tokens * 1.0
    return Batch(tokens * (places < torch.tensor(lengths)[:, None]), mask, numbers, torch.arange(len(lengths)) * 1.0)


def responses(part: MicroBatch) -> list[tuple[int, int, int]]:
    """Return (token before, its position, token) of each response token, as the micro-batch has them."""
    places = part.places[: part.trained_tokens]
    before, position = part.input_ids.flatten()[places], part.position_ids.flatten()[places]
    return list(zip(before.tolist(), position.tolist(), part.targets.tolist(), strict=False))


def test_a_pack_and_padded_rows_have_the_same_targets_in_order() -> None:
    batch = batch_with([5, 2, 7, 3])
    every = torch.tensor([2, 0, 1, 3])
    wanted = [(201, 1, 202), (202, 2, 203), (203, 3, 204), (204, 4, 205), (205, 5, 206)]
    wanted += [(1, 1, 2), (2, 2, 3), (3, 3, 4), (301, 1, 302)]
    for form in (make_pack, make_rows):
        part = form(replace(batch, proximal_logprobs=batch.behaviour_logprobs + 0.5), every, device=CPU)
        assert responses(part) == wanted
        assert part.behaviour_logprobs.tolist() == [token for *_, token in wanted]
        assert part.proximal_logprobs is not None
        assert part.proximal_logprobs.tolist() == [token + 0.5 for *_, token in wanted]
        assert part.advantages.tolist() == [2] * 5 + [0] * 3 + [3]
        assert batch.tokens[part.rows, part.columns].tolist() == [token for *_, token in wanted]
        assert part.real_tokens == 6 + 4 + 2, "the last token of a row is only a target"


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=30))
def test_the_padding_of_a_pack_is_small_and_belongs_to_its_last_row(lengths: list[int]) -> None:
    part = make_pack(batch_with([max(1, length) for length in lengths]), torch.arange(len(lengths)), device=CPU)
    assert part.boundaries is not None
    ends, size = part.boundaries.cu_seqlens, part.input_ids.numel()
    assert ends.dtype == torch.int32
    real = [length - 1 for length in lengths if length > 2]  # two tokens are the prompt
    padding = size - max(1, part.real_tokens)
    assert padding <= min(127, size / 16)
    assert ends.diff().tolist() == ([*real[:-1], real[-1] + padding] if real else [1])
    assert max(ends.diff()) <= part.boundaries.max_length <= max(ends.diff()) * 17 / 16
    assert part.position_ids.flatten()[size - padding :].eq(0).all(), "a place that every model knows"


def test_an_empty_part_has_one_token_and_no_target() -> None:
    batch, none = batch_with([3, 4]), torch.empty(0, dtype=torch.long)
    for form in (make_pack, make_rows):
        part = form(batch, none, device=CPU)
        assert part.input_ids.shape == (1, 1)
        assert (len(part.targets), part.trained_tokens, part.real_tokens) == (0, 0, 0)
