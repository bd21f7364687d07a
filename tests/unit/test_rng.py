"""All generators of a process go on where they were."""

import json
import random

import numpy as np
import torch

from hwrl.train.rng import rng_state, set_rng_state
from hwrl_cpu import INFO, CpuBackend

BACKEND = CpuBackend(INFO)


def _draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        float(torch.randn(1)),
        float(np.random.rand()),
    ]


def test_the_same_numbers_are_drawn_after_a_resume() -> None:
    _draw()  # half of a pair of normal numbers is held back by Python and by numpy
    state = json.loads(json.dumps(rng_state(BACKEND)))
    expected = [_draw() for _ in range(3)]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    set_rng_state(state, BACKEND)
    assert [_draw() for _ in range(3)] == expected
