"""How responses are sampled: values out of their range are refused."""

from __future__ import annotations

from typing import Any

import pytest

from hwrl.interfaces import Sampling


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_new_tokens": 0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
    ],
)
def test_a_value_out_of_its_range_is_refused(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name}="):
        Sampling(**{"max_new_tokens": 1, **wrong})
