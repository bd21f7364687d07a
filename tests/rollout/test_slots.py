"""The embedded engine's cache: slots are copied all at once, with little memory."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hwrl.rollout import slots
from hwrl.rollout.slots import SlotCache

_ROWS, _LENGTH, _HEADS, _SIZE = 6, 50, 2, 4
_POSITION_NBYTES = _HEADS * _SIZE * 4


class _Largest(TorchDispatchMode):
    """Notes the bytes of the largest storage that an operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)}
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


@pytest.fixture(params=[1, 7 * 4 * _POSITION_NBYTES, 1 << 20])
def copy_nbytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The limit for a part: less than one position, seven positions of four slots, and more than there is."""
    monkeypatch.setattr(slots, "COPY_NBYTES", request.param)
    return int(request.param)


@pytest.fixture
def cache() -> SlotCache:
    """Two layers of six slots with random content."""
    cache = SlotCache(slots=_ROWS, length=_LENGTH, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(_LENGTH).expand(_ROWS, _LENGTH)
    cache.place(slice(0, _ROWS), positions, _LENGTH)
    for layer in range(2):
        keys, values = torch.randn(2, _ROWS, _HEADS, _LENGTH, _SIZE, generator=generator)
        cache.update(keys, values, layer)
    return cache


def _content(cache: SlotCache) -> torch.Tensor:
    return torch.stack([torch.stack([layer.keys, layer.values]) for layer in cache.layers])


def test_a_move_exchanges_slots_and_leaves_the_rest(cache: SlotCache, copy_nbytes: int) -> None:
    before = _content(cache).clone()
    sources, targets = torch.tensor([0, 4, 2, 5]), torch.tensor([4, 0, 5, 1])
    with _Largest() as largest:
        cache.move(sources, targets, 45)
    expected = before.clone()
    expected[:, :, targets, :, :45] = before[:, :, sources, :, :45]
    assert torch.equal(_content(cache), expected)
    assert largest.nbytes <= max(copy_nbytes, 4 * _POSITION_NBYTES)


def test_prompts_are_spread_to_the_slots_of_their_samples(cache: SlotCache, copy_nbytes: int) -> None:
    before = _content(cache).clone()
    with _Largest() as largest:
        cache.spread(slice(1, 5), torch.tensor([0, 0, 1, 1]), 45)
    expected = before.clone()
    expected[:, :, 1:5, :, :45] = before[:, :, [1, 1, 2, 2], :, :45]
    assert torch.equal(_content(cache), expected)
    assert largest.nbytes <= max(copy_nbytes, 4 * _POSITION_NBYTES)
