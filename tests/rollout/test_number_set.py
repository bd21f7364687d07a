"""A set of prompts in a bit each."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hwrl.rollout.ledger_state import from_ranges, to_ranges
from hwrl.rollout.number_set import NumberSet


@given(st.lists(st.integers(0, 20_000)))
def test_it_holds_what_a_set_holds(numbers: list[int]) -> None:
    found = NumberSet(numbers)
    assert len(found) == len(set(numbers)) and from_ranges(found.ranges()) == sorted(set(numbers))
    assert all(number in found for number in numbers) and found.ranges() == to_ranges(set(numbers))
    assert 20_001 not in found and NumberSet(from_ranges(found.ranges())).ranges() == found.ranges()
