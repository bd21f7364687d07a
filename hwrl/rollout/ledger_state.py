"""The saved state of the prompt ledger: it is checked before it is used, and counted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from hwrl.errors import DataError

PromptState = Literal["trained", "filtered", "failed", "owed"]
_MOST_PROMPTS = 1 << 32
"""A saved state with more prompts is not loaded: it would decide how much memory is taken, one bit for each."""
_MOST_UNTRAINED = 1 << 22
"""Likewise for the prompts between two batches, which become a list."""


def check_state(state: Mapping[str, Any]) -> None:
    """Raise DataError unless ``state`` may be one of :meth:`PromptLedger.state_dict`: numbers in it become sizes."""
    try:
        why = _find_mistake(state)
    except (LookupError, TypeError, ValueError, AttributeError) as exc:
        why = f"it is malformed: {type(exc).__name__}: {exc!s:.100}"
    if why:
        raise DataError(
            "the saved state of the prompts cannot be used",
            why=why,
            fix="resume from another checkpoint, or start anew",
        )


def _find_mistake(state: Mapping[str, Any]) -> str:
    numbers = {name: state[name] for name in ("version", "trained", "next")}
    numbers["groups_per_version"] = state.get("groups_per_version", 1)
    for name, number in numbers.items():
        if type(number) is not int or not 0 <= number <= _MOST_PROMPTS:
            return f"{name} is {number!r:.50}, and not a number from 0 to {_MOST_PROMPTS:,}"
    owed, untrained = state["owed"], state.get("untrained", {"filtered": [], "failed": []})
    if len(set(owed)) < len(owed) or any(type(number) is not int or not 0 <= number < state["next"] for number in owed):
        return "owed lists a prompt twice, or one that was never leased"
    settled = {"filtered": state.get("filtered", []), "failed": state.get("failed", [])}
    for name, ranges in {**settled, "untrained": untrained["filtered"]}.items():
        end = -1
        for first, last in ranges:
            if not (type(first) is type(last) is int and end < first <= last < state["next"]):
                return f"{name} has the range {[first, last]!r:.50}, which is none of prompts that were leased"
            end = last
    if count_in_ranges(untrained["filtered"]) > _MOST_UNTRAINED:
        return f"untrained has more than {_MOST_UNTRAINED:,} prompts"
    if not all(type(number) is int and type(reason) is str for number, reason in untrained["failed"]):
        return "untrained has a failed prompt without a reason"
    found = state["trained"] + len(owed) + sum(map(count_in_ranges, settled.values()))
    return "" if found == state["next"] else f"its states have {found:,} prompts, and {state['next']:,} were leased"


def count_prompts(state: Mapping[str, Any]) -> dict[PromptState, int]:
    """Return the number of prompts in each state of ``state``, from :meth:`PromptLedger.state_dict`.

    Raises DataError if ``state`` is malformed.
    """
    check_state(state)
    return {
        "trained": state["trained"],
        "filtered": count_in_ranges(state.get("filtered", [])),
        "failed": count_in_ranges(state.get("failed", [])),
        "owed": len(state["owed"]),
    }


def count_in_ranges(ranges: Iterable[Sequence[int]]) -> int:
    """Return how many numbers are in ``ranges``."""
    return sum(last - first + 1 for first, last in ranges)


def to_ranges(numbers: Iterable[int]) -> list[list[int]]:
    """Return ``numbers`` as ascending ranges, each a pair of its first and last number.

    >>> to_ranges([7, 1, 3, 2])
    [[1, 3], [7, 7]]
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return ranges


def from_ranges(ranges: Iterable[Sequence[int]]) -> list[int]:
    """Return the numbers in ``ranges``, in their order.

    >>> from_ranges([[1, 3], [7, 7]])
    [1, 2, 3, 7]
    """
    return [number for first, last in ranges for number in range(first, last + 1)]
