"""Reward workers for tests: a fixture that starts them, and responses of given lengths to score."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from hwrl.interfaces import Ints
from hwrl.rollout import RewardWorkers

FUNCTIONS = "tests.support.reward_functions"
Start = Callable[..., RewardWorkers]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[RewardWorkers] = []

    def begin(function: str, **settings: Any) -> RewardWorkers:
        target = function if ":" in function else f"{FUNCTIONS}:{function}"
        started.append(RewardWorkers(target, decode=lambda ids: " ".join(map(str, ids)), **settings))
        return started[-1]

    yield begin
    for workers in started:
        workers.close()


def responses_of(lengths: Sequence[int]) -> list[Ints]:
    return [np.arange(1, length + 1, dtype=np.int32) for length in lengths]
