"""A model with its optimizer, trained with and without an Offloader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hwrl.errors import MemoryStateError
from hwrl.interfaces import Backend
from hwrl.memory import Offloader


@dataclass
class Trained:
    """A model, its optimizer, and how both are used."""

    model: nn.Module
    optimizer: Any
    forward: Callable[[], torch.Tensor]

    def step(self) -> float:
        loss = self.forward().square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())

    def memory(self) -> list[torch.Tensor]:
        """Return every tensor of the model and of the optimizer's state, and those inside of tensor subclasses."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        optimizer = getattr(self.optimizer, "optim", self.optimizer)  # of ZeroRedundancyOptimizer
        tensors += [value for state in optimizer.state.values() for value in state.values()]
        return [part for one in tensors for part in _parts(one)]


def _parts(tensor: Any) -> Iterator[torch.Tensor]:
    if not isinstance(tensor, torch.Tensor):
        return
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.detach()
        yield from getattr(tensor, "hidden", ())
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


def check_equal_after_offloads(make: Callable[[], Trained], backend: Backend) -> None:
    """Offload and load between steps; every loss and every bit is that of the twin without an Offloader."""
    moved, stayed = make(), make()
    assert moved.step() == stayed.step()
    with Offloader(moved.model, moved.optimizer, backend=backend) as offloader:
        for _ in range(3):
            offloader.offload()
            assert not any(one.untyped_storage().nbytes() for one in moved.memory())
            for use in (moved.forward, moved.model.state_dict, moved.optimizer.step):
                with pytest.raises(MemoryStateError, match="cannot be used"):
                    use()
            with offloader.loaded():
                assert moved.step() == stayed.step()
    assert moved.step() == stayed.step()
    pairs = list(zip(moved.memory(), stayed.memory(), strict=True))
    assert len(pairs) >= 2 and all(torch.equal(one, other) for one, other in pairs)
