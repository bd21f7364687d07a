"""The order of the prompts. A prompt is a pure function of the data, the seed and its sequence number."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import gcd, lcm

import numpy as np

from hwrl.errors import DataError, short_repr
from hwrl.interfaces import Ints
from hwrl.rollout.data import Prompt

_MOST_PARTS = 1_000_000
"""The most prompts in a block of a mixture: each process draws whole blocks."""
_COMPARED = 256
"""How many sequence numbers test whether a curriculum is pure."""


@dataclass(frozen=True)
class PromptSet:
    """One data set with its weight in a mixture. ``name`` is empty if it is the run's only one."""

    name: str
    prompts: Sequence[Prompt]
    weight: float = 1.0


PromptOrder = Callable[[int], tuple[int, int]]
"""Returns, for a sequence number, the index of the data set, and the index of the prompt in it."""
Curriculum = Callable[[Sequence[PromptSet], int], PromptOrder]
"""Returns the order for the data sets and the run's seed. Each process calls it.

The order must be pure: it depends only on these arguments and the sequence number. So a number means the same prompt in
every process."""


class PromptStream:
    """The endless stream of prompts. A sequence number means the same prompt in every process and after every resume.

    ``curriculum`` orders the prompts; the default is :func:`mixture`. Raises DataError if two calls of ``curriculum``
    give different orders. Reading a prompt raises DataError if ``curriculum`` has none for its number.
    """

    def __init__(self, sets: Sequence[PromptSet], *, seed: int, curriculum: Curriculum | None = None) -> None:
        self._sets = sets
        self._order = (curriculum or mixture)(sets, seed)
        if curriculum is not None:
            self._check_pure(curriculum(sets, seed))

    def __getitem__(self, sequence_number: int) -> Prompt:
        place = _place(self._order, sequence_number)
        try:
            index, row = place
            if index < 0 or row < 0:
                raise IndexError
            return self._sets[index].prompts[row]
        except (TypeError, ValueError, IndexError) as exc:
            sizes = ", ".join(f"{number}: {len(one.prompts)} prompts" for number, one in enumerate(self._sets))
            raise DataError(
                f"the curriculum has no prompt for sequence number {sequence_number}",
                why=f"it returned {place!r}; the data sets are {sizes}",
                fix="return the index of a data set, and the index of a prompt in it",
            ) from exc

    def _check_pure(self, again: PromptOrder) -> None:
        first = [_place(self._order, number) for number in range(_COMPARED)]
        second = [_place(again, number) for number in reversed(range(_COMPARED))]
        if first != second[::-1]:
            raise DataError(
                "the curriculum is not a pure function",
                why="two calls gave different orders: a prompt would be lost or trained twice after a restart",
                fix="draw random numbers from the seed and the sequence number only, and keep no state between calls",
            )


def _place(order: PromptOrder, sequence_number: int) -> tuple[int, int]:
    try:
        return order(sequence_number)
    except (Exception, SystemExit, GeneratorExit) as exc:  # the user's code may raise anything
        raise DataError(
            f"the curriculum has no prompt for sequence number {sequence_number}",
            why=f"it raised {short_repr(exc)}",
            fix="return the index of a data set, and the index of a prompt in it, for each number",
        ) from exc


def mixture(sets: Sequence[PromptSet], seed: int) -> PromptOrder:
    """Return the order of a mixture in which each set has exactly its share.

    The stream consists of blocks. With weights 1 and 3, each block has four prompts: one of the first set and three of
    the second, in an order drawn from ``seed``. A set goes through its prompts epoch after epoch, each epoch in a new
    order. Raises DataError if the weights need blocks of more than a million prompts.
    """
    is_mixed, sizes = len(sets) > 1, [len(one.prompts) for one in sets]
    parts = _parts([one.weight for one in sets]) if is_mixed else [1]

    @functools.lru_cache(maxsize=len(sets))
    def rows_of(index: int, epoch: int) -> Ints:
        key = [seed, index + 1, epoch] if is_mixed else [seed, epoch]
        return np.random.default_rng(key).permutation(sizes[index]).astype(np.int32)

    @functools.lru_cache(maxsize=1)
    def draws_of(block: int) -> tuple[Ints, Ints]:
        """Return the set of each prompt in ``block``, and the number of earlier draws from this set in the block."""
        in_order = np.repeat(np.arange(len(parts), dtype=np.int32), parts)
        chosen = np.random.default_rng([seed, 0, block]).permutation(in_order)
        draws = np.empty(len(chosen), dtype=np.int32)
        for index, count in enumerate(parts):
            draws[chosen == index] = np.arange(count, dtype=np.int32)
        return chosen, draws

    def order(number: int) -> tuple[int, int]:
        index, draw = 0, number
        if is_mixed:
            block, place = divmod(number, sum(parts))
            chosen, draws = draws_of(block)
            index = int(chosen[place])
            draw = block * parts[index] + int(draws[place])
        epoch, row = divmod(draw, sizes[index])
        return index, int(rows_of(index, epoch)[row])

    return order


def _parts(weights: Sequence[float]) -> list[int]:
    """Return the smallest whole numbers with the ratios of ``weights``; 0.1 counts as one tenth exactly.

    >>> _parts([0.7, 0.2, 0.1])
    [7, 2, 1]
    """
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * scale) for weight in exact]
    parts = [number // gcd(*whole) for number in whole]
    if sum(parts) > _MOST_PARTS:
        raise DataError(
            "the weights of the mixture are too exact",
            why=f"{', '.join(f'{weight:g}' for weight in weights)} need blocks of {sum(parts):,} prompts",
            fix=f"round them, so that at most {_MOST_PARTS:,} equal parts are needed",
        )
    return parts
