"""All generators of a process go on where they were."""

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from hwrl.checkpoint import rng_state, set_rng_state
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


class _Elsewhere(CpuBackend):
    """Another kind of device, whose generator has a state of another size."""

    def rng_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8)


def test_a_run_goes_on_on_another_kind_of_device(caplog: pytest.LogCaptureFixture) -> None:
    state = json.loads(json.dumps(rng_state(_Elsewhere(replace(INFO, device_type="elsewhere")))))
    expected = _draw()
    set_rng_state(state, BACKEND)
    assert _draw() == expected
    assert "is not restored: it was saved on 'elsewhere' and this is 'cpu'" in caplog.text
