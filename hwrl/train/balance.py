"""Divide the responses of a step among mini-batches and ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from hwrl.errors import EngineError


def divide_rows(costs: Sequence[int], *, mini_batches: int, shares: int) -> list[list[list[int]]]:
    """Return the row indices of each share of each mini-batch. ``costs`` has the cost of each row; only ratios count.

    The mini-batches hold the rows in order, in equal numbers, so they do not depend on ``shares``. Each share of a
    mini-batch holds at least one row. Equal arguments give equal results on every rank. Raises EngineError if a
    mini-batch has fewer rows than shares.
    """
    if len(costs) < mini_batches * shares:
        raise EngineError(
            f"the step has too few responses for the trainer's ranks: {len(costs)}",
            why=f"{shares} ranks need a response each in each of {mini_batches} mini-batches, as they train together",
            fix="lower algorithm.mini_batches, train on fewer ranks or with more prompts a step",
        )
    parts = np.array_split(np.arange(len(costs)), mini_batches)
    return [_balance(part.tolist(), costs, shares=shares) for part in parts]


def imbalance(division: Sequence[Sequence[Sequence[int]]], costs: Sequence[int]) -> float:
    """Return the time of a step divided by the time with equal shares; 1.0 is the best.

    The ranks wait for each other in each mini-batch, so the cost of its costliest share counts as its time.
    """
    loads = [[sum(costs[row] for row in share) for share in part] for part in division]
    mean = sum(map(sum, loads)) / len(loads[0])
    return sum(map(max, loads)) / mean


def _balance(rows: Sequence[int], costs: Sequence[int], *, shares: int) -> list[list[int]]:
    """Give each row, the costliest first, to the share with the least cost; each share keeps the order of rows.

    This is Graham's longest-processing-time rule, https://doi.org/10.1137/0117039: the costliest share is at most 4/3
    of the optimum.
    """
    divided: list[list[int]] = [[] for _ in range(shares)]
    loads = [(0, share) for share in range(shares)]
    for row in sorted(rows, key=lambda row: -costs[row]):
        load, share = loads[0]
        divided[share].append(row)
        heapq.heapreplace(loads, (load + costs[row], share))
    return [sorted(share) for share in divided]
