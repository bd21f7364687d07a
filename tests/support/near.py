"""Numbers that are equal but for rounding, on any processor: each adds in an order of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def assert_near(found: Any, wanted: Any, *, share: float = 1e-4) -> None:
    """Raise if tensors, or dictionaries or sequences of them, differ by more than ``share`` of their norm.

    A single element may differ by more: where a gradient is almost zero, Adam makes a whole step of a rounding error.
    One wrong element of thousands, or a part of a sum that is missing, is far more than the share.
    """
    if isinstance(wanted, Mapping):
        assert found.keys() == wanted.keys()
        pairs = {name: (found[name], wanted[name]) for name in wanted}
    elif isinstance(wanted, torch.Tensor):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        apart, norm = (found.double() - wanted.double()).norm().item(), wanted.double().norm().item()
        limit = share * norm + 1e-6 * wanted.numel() ** 0.5
        assert apart <= limit, f"they are {apart:g} apart, of a norm of {norm:g}; {limit:g} is rounding"
        return
    else:
        assert isinstance(wanted, Sequence) and len(found) == len(wanted)
        pairs = {str(place): pair for place, pair in enumerate(zip(found, wanted, strict=True))}
    for name, (one, other) in pairs.items():
        try:
            assert_near(one, other, share=share)
        except AssertionError as exc:
            raise AssertionError(f"{name}: {exc}") from None
